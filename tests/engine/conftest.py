"""One process group of one rank here, and a pool of two ranks beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine.pool import Ranks, free_port

from hydraflow.engine import process_group
from hydraflow.models.tiny import make_model


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session", autouse=True)
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    process_group.start(rank=0, world_size=1, address="127.0.0.1", port=free_port(), device_type="cpu")
    yield
    process_group.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=2, heads=2, kv_heads=1))
