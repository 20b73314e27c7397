"""What tests of several folders share: one Ray, one process group of one rank, one cache of made models."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from once import folder_of_all

if TYPE_CHECKING:
    from engine.pool import Ranks

# A test run in the background inherits that SIGINT is ignored, and would hand that on to the commands that it
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Inside of a Slurm job its variables would fill in keys that the tests leave open.
for _name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[_name]

# A worker of Ray that waited for its template in vain starts by itself, and imports the tests' actors first.
_TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])

# By default Ray's workers give way to all other processes, and would wait for those of other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

# How long an example takes depends on what else the machine does. CI draws the same examples every time.
settings.register_profile("hydraflow", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("hydraflow")


# Until all is imported there is no garbage; what was imported is never looked at again.
gc.disable()

SLOW = {"ray_session", "cluster", "head", "ranks", "pools", "made", "recipe_cache", "sft_run"}
"""Fixtures with Ray or Slurm, ranks in processes of their own, checkpoints of such ranks, or a trained model.
A test that uses one, directly or not, is slow."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="without slow tests: those that use Ray or several ranks, train, or wait for other programs",
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether a file below tests/ has neither tests nor doctests: then only tests that need it import it, and
    Megatron with it."""
    if collection_path.suffix != ".py" or collection_path.name.startswith("test_"):
        return None
    return True if ">>>" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow tests, and puts the files with most of them first: each test process takes a file at a time,
    and short ones at the end let all finish together."""
    weights: Counter[Path] = Counter()
    for item in items:
        if SLOW.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        slow = item.get_closest_marker("slow")
        if slow and not slow.kwargs.get("short"):
            limit = item.get_closest_marker("timeout")
            weights[item.path] += limit.args[0] if limit else 300
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        for item in items:
            draw_few(getattr(item, "obj", None))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -weights[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All is collected, or this process hands the tests out. What they leave is small, and looking for it as
    often as by default takes a twelfth of their time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def draw_few(test: object) -> None:
    """Lets a property test draw 25 examples where it asks for more. hypothesis offers no way to change
    what a test's own settings say."""
    test = getattr(test, "__func__", test)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > 25:
        test._hypothesis_internal_use_settings = settings(own, max_examples=25)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A run in the process of the tests sets torch's threads; what later tests measure depends on them."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray that counts 8 CPUs. `Runtime.start` finds it running, uses it and leaves it running. Its
    template imports Megatron-Core, too, so that workers with that engine need not."""
    from hydraflow.dispatch import template
    from hydraflow.dispatch.config import RayInitConfig
    from hydraflow.dispatch.start import start_ray, stop_ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "LIBRARIES", (*template.LIBRARIES, "hydraflow.engine.megatron.engine"))
        start_ray(RayInitConfig(num_cpus=8), cpus=8)
    yield
    stop_ray()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of which this process is the only rank."""
    import socket

    import torch

    from hydraflow.engine import process_group

    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    process_group.start(
        rank=0,
        world_size=1,
        address="127.0.0.1",
        port=listener.getsockname()[1],
        device_type="cpu",
        timeout_s=60,
        listen_fd=listener.detach(),
    )
    yield
    process_group.stop()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks in processes of their own."""
    from engine.pool import Ranks

    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model of two layers with random weights."""
    from hydraflow.models.tiny import make_model

    return str(
        make_model(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=2, heads=2, kv_heads=1)
    )


@pytest.fixture(scope="session")
def recipe_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the arithmetic recipe keeps its assets during the test run, those of all test processes
    ($HYDRAFLOW_TEST_CACHE keeps them between runs)."""
    kept = os.environ.get("HYDRAFLOW_TEST_CACHE")
    return Path(kept) if kept else folder_of_all(tmp_path_factory) / "recipe_cache"
