"""The law of gradients on the Megatron engine, for every loss: `test_gradient_law.py`, in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, so it comes first

pytest.importorskip("megatron.core")

from engine.megatron_jobs import assembled
from engine.megatron_models import sizes, started
from engine.pool import Ranks
from workers import gradient_jobs as jobs
from workers.test_gradient_law import (  # noqa: F401
    CASES,
    FEW_CUTS,
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
    cases = [case for case in CASES[head] if case.name.endswith(" seq-mean-token-mean")]
    model = plain(head)
    args = path, head, LAYOUTS[layout], in_float32(model.batch), cases, FEW_CUTS
    found = ranks.run(jobs.measure_on_megatron, *args)
    whole = {}
    for case in cases:
        parts = [assembled([rank[case.name][cut] for rank in found]) for cut in range(len(FEW_CUTS))]
        whole[case.name] = torch.stack([torch.cat([g[name].flatten() for name in sorted(g)]) for g in parts])
    assert_lawful(whole, model, cases, 1e-4, FEW_CUTS)
