"""Engines need a process group, and tests of several ranks groups of processes and models."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engine.pool import Ranks, started

import hydraflow.engine.megatron  # noqa: F401  lets Megatron-Core run without CUDA, before any test imports it

if TYPE_CHECKING:
    from engine.megatron_ways import Oracle

MEGATRON = re.compile(r"^(from|import) .*megatron", re.MULTILINE)
TESTS = Path(__file__).parent.glob("test_*.py")
collect_ignore = (
    [] if find_spec("megatron") else [path for path in TESTS if MEGATRON.search(path.read_text())]
)
"""Megatron-Core may not be there: then files that import it are left out, and pytest warns."""
if collect_ignore:
    warnings.warn(f"without Megatron-Core: {len(collect_ignore)} files of tests are left out", stacklevel=1)


@pytest.fixture(autouse=True)
def always_one_rank(one_rank: None) -> None: ...


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[dict[int, Ranks]]:
    """Groups of ranks by their number: of the module's `GROUP_SIZES`, by default one, two and four ranks."""
    with started(getattr(request.module, "GROUP_SIZES", (1, 2, 4))) as made:
        yield made


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, pools: dict[int, Ranks]) -> Ranks:
    """The module's number of `RANKS`, by default two."""
    return pools[getattr(request.module, "RANKS", 2)]


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each of the module's `FAMILIES`, by default all."""
    from engine.megatron_models import FAMILIES, save_model

    folder = tmp_path_factory.mktemp("models")
    for name, config in getattr(request.module, "FAMILIES", FAMILIES).items():
        save_model(config, folder / name)
    return folder


@pytest.fixture(scope="module")
def oracle(models: Path) -> Oracle:
    """What transformers and the FSDP engine say of the models."""
    from engine.megatron_ways import Oracle

    return Oracle(models)
