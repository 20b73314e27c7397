"""What tests of several folders share: one Ray for the whole test run, one cache of made models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray that counts 8 CPUs. `Runtime.start` finds it running, uses it and leaves it running."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def recipe_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the arithmetic recipe keeps its assets during the test run ($HYDRAFLOW_TEST_CACHE keeps them between runs)."""
    kept = os.environ.get("HYDRAFLOW_TEST_CACHE")
    return Path(kept) if kept else tmp_path_factory.mktemp("cache")
