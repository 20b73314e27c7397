"""Engines need a process group, and tests of several ranks groups of processes and models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.pool import Ranks


@pytest.fixture(autouse=True)
def always_one_rank(one_rank: None) -> None: ...


@pytest.fixture(scope="module")
def pools(request: pytest.FixtureRequest) -> Iterator[dict[int, Ranks]]:
    """Groups of ranks by their number: of the module's `GROUP_SIZES`, by default one, two and four ranks."""
    from engine.megatron_models import started

    with started(getattr(request.module, "GROUP_SIZES", (1, 2, 4))) as made:
        yield made


@pytest.fixture(scope="module")
def ranks(pools: dict[int, Ranks]) -> Ranks:
    """Two ranks."""
    return pools[2]


@pytest.fixture(scope="module")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each of the module's `FAMILIES`, by default all."""
    from engine.megatron_models import FAMILIES, save_model

    folder = tmp_path_factory.mktemp("models")
    for name, config in getattr(request.module, "FAMILIES", FAMILIES).items():
        save_model(config, folder / name)
    return folder
