"""A group that may replace its processes: what is made again, what is lost, and when it gives up."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dispatch import programs

from hydraflow.dispatch import future
from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Recovery, RoleGroup, Timeouts
from hydraflow.dispatch.modes import Dispatch, mesh_mode, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import ProcessContext, RoleSpec, Worker
from hydraflow.errors import WorkerError
from hydraflow.protocol.batch import DataProto


class Fragile(Worker):
    """Dies while there is a file with the name of the method and of its rank, which it takes away."""

    def __init__(self, process: ProcessContext, folder: Path):
        super().__init__(process)
        self.folder, self.factor = folder, 0

    def die_if_asked(self, method: str) -> None:
        for file in sorted(self.folder.glob(f"{method} {self.process.rank}*"))[:1]:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def learn(self, factor: int) -> int:
        """What must be passed to a new process again."""
        self.die_if_asked("learn")
        self.factor = factor
        return os.getpid()

    @register(dispatch_mode=mesh_mode("any"), blocking=False)
    def times(self, batch: DataProto) -> DataProto:
        """`x` (B, 50000) times the factor: too large to travel inside an answer."""
        self.die_if_asked("times")
        column = (batch.get("x") * self.factor)[:, None].expand(-1, 50_000).contiguous()
        return DataProto.from_dict({"y": column})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def forgotten(self) -> str:
        """Not made again."""
        self.die_if_asked("forgotten")
        return "an answer"


@pytest.fixture(scope="module")
def runtime(ray_session: None) -> Iterator[Runtime]:
    with Runtime(RayInitConfig(), Timeouts(start=120, call=60)) as runtime:
        runtime.start([ResourcePool("fragile", [2], cpus=0.5, groups=2)])
        yield runtime


def start(runtime: Runtime, folder: Path, max_retries: int) -> RoleGroup:
    """Two processes that know the factor 3."""
    group = runtime.group("fragile", {"fragile": RoleSpec(Fragile, (folder,))})
    runtime.await_ready()
    role = group.role("fragile")
    role.call(Fragile.learn, 3).get()

    def restore(rank: int) -> None:
        role.call_rank(rank, Fragile.learn, 3).get()

    group.recovery = Recovery(restore, max_retries)
    return role


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def running(runtime: Runtime, folder: Path) -> Iterator[RoleGroup]:
    role = start(runtime, folder, max_retries=2)
    yield role
    runtime.end(role.group)


@pytest.fixture
def role(running: RoleGroup) -> RoleGroup:
    running.call(Fragile.learn, 3).get()
    running.group.replaced = 0
    return running


def ask_to_die(folder: Path, method: str, rank: int, times: int = 1) -> None:
    for number in range(times):
        (folder / f"{method} {rank} {number}").touch()


def product(runtime: Runtime, role: RoleGroup) -> list[float]:
    made = role.call(Fragile.times, DataProto.from_dict({"x": torch.arange(4.0)})).get()
    found: torch.Tensor = runtime.fetch(made).get("y")
    return [float(value) for value in found[:, 0]]


def test_calls_are_made_again_on_every_rank_that_died(
    runtime: Runtime, role: RoleGroup, folder: Path
) -> None:
    before = role.call(Fragile.learn, 3).get()
    for rank in (0, 1):
        ask_to_die(folder, "times", rank)
    assert product(runtime, role) == [0, 3, 6, 9]
    assert role.group.replaced == 2
    assert not set(before) & set(role.call(Fragile.learn, 3).get())
    former = {process.facts.pid: process.name for process in role.group.former}
    assert [former[pid] for pid in before] == ["fragile rank 0", "fragile rank 1"], "for the timeline"


def test_a_process_may_die_while_it_is_restored(runtime: Runtime, role: RoleGroup, folder: Path) -> None:
    ask_to_die(folder, "times", 1)
    ask_to_die(folder, "learn", 1)
    assert product(runtime, role) == [0, 3, 6, 9] and role.group.replaced == 2


def test_an_idle_process_is_replaced_at_its_next_call_and_not_while_another_group_works(
    runtime: Runtime, role: RoleGroup, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What restores it may need devices on which that group works."""
    monkeypatch.setattr(future, "UNANSWERED", 0.1)
    other = start(runtime, folder, max_retries=0)
    other.group.recovery = None
    os.kill(role.call(Fragile.learn, 3).get()[0], signal.SIGKILL)
    other.call(Fragile.sleep, 2.0)
    assert role.group.replaced == 0
    assert product(runtime, role) == [0, 3, 6, 9] and role.group.replaced == 1
    runtime.end(other.group)


def test_what_a_dead_process_made_is_still_there(runtime: Runtime, role: RoleGroup, folder: Path) -> None:
    made = role.call(Fragile.times, DataProto.from_dict({"x": torch.arange(4.0)})).get()
    ask_to_die(folder, "forgotten", 0)
    assert role.call(Fragile.forgotten).get() == [None, "an answer"]
    assert runtime.fetch(made).get("y")[:, 7].tolist() == [0, 3, 6, 9]


def test_calls_behind_the_one_that_died_are_made_again_in_their_order(
    runtime: Runtime, role: RoleGroup, folder: Path
) -> None:
    ask_to_die(folder, "times", 0)
    batch = DataProto.from_dict({"x": torch.arange(2.0)})
    calls = [role.call(Fragile.times, batch), role.call(Fragile.learn, 5), role.call(Fragile.times, batch)]
    results = [call.get() for call in calls]
    assert [runtime.fetch(results[i]).get("y")[:, 0].tolist() for i in (0, 2)] == [[0, 3], [0, 5]]


@pytest.mark.parametrize(("method", "deaths"), [("times", 2), ("learn", 1)], ids=["a call", "restoring"])
def test_it_gives_up(runtime: Runtime, tmp_path: Path, method: str, deaths: int) -> None:
    role = start(runtime, tmp_path, max_retries=1)
    ask_to_die(tmp_path, "times", 1)
    ask_to_die(tmp_path, method, 1, times=deaths)
    with pytest.raises(
        WorkerError, match=rf"^fragile rank 1 on node .* failed in {method}: the process died"
    ):
        product(runtime, role)
    assert role.group.replaced == 1
    runtime.end(role.group)


@pytest.mark.slow(short=True)
@pytest.mark.parametrize("workers_first", [True, False])
def test_a_process_whose_machine_is_lost_is_not_started_again(workers_first: bool) -> None:
    text = f"{programs.FORKS_WORKERS}\nfrom dispatch.lost_node import main; main({workers_first})"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets must be short
        process, log = programs.start(Path(folder), text, RAY_TMPDIR=folder)
        assert process.wait(timeout=200) == 0, log.read_text()
        found = re.search(
            r"^after ([\d.]+) s: [a-z ]+ rank [01] on node .* failed in \w+: .*", log.read_text(), re.M
        )
        assert found and float(found[1]) < 60, log.read_text()
