"""The law of gradients on the Megatron engine, for every loss: `test_gradient_law.py`, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine.megatron_jobs import assembled
from engine.megatron_models import sizes
from engine.pool import Ranks, started
from workers import gradient_jobs as jobs
from workers.test_gradient_law import (  # noqa: F401
    CASES,
    Plain,
    assert_lawful,
    in_float32,
    path,
    plain,
)

from hydraflow.models.tiny import make_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with heads for two ranks of each kind."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return str(make_model(folder, hidden=32, layers=2, heads=4, kv_heads=2))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks."""
    with started((2,)) as made:
        yield made[2]


LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": sizes(),
    "tp 2": sizes(2),
    "pp 2": sizes(1, 2),
    "context 2": sizes(context_parallel_size=2),
}


@pytest.mark.parametrize("head", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_is_the_plain_one_however_it_was_computed(
    path: str,  # noqa: F811
    plain: Callable[[str], Plain],  # noqa: F811
    ranks: Ranks,
    layout: str,
    head: str,
) -> None:
    args = path, head, LAYOUTS[layout], in_float32(plain(head).batch)

    def measure(cases: list[jobs.AnyCase]) -> list[Mapping[str, Tensor]]:
        of_ranks, whole = ranks.run(jobs.measure_on_megatron, *args, cases), {}
        for case in cases:
            parts = [assembled(cut) for cut in zip(*(found[case.name] for found in of_ranks), strict=True)]
            flat = [torch.cat([part[name].flatten() for name in sorted(part)]) for part in parts]
            whole[case.name] = torch.stack(flat)
        return [whole]

    assert_lawful(measure, plain(head), CASES[head], 1e-4)
