"""Weights on their way to other processes, through shared memory or by a broadcast, which here stays on one
machine, too. Every bit arrives; a process that dies meanwhile is replaced and gets them, one that hangs is
named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workers.by_hand import ChangingActor, actor_spec, rollout_spec

from hydraflow.dispatch.config import RayInitConfig
from hydraflow.dispatch.group import Recovery, Timeouts
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.runtime import Runtime
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import WorkerError
from hydraflow.generation.config import RolloutConfig
from hydraflow.models.tiny import make_model
from hydraflow.trainer.roles import _on_one_node
from hydraflow.trainer.weight_links import Broadcast, SeparateProcesses, SharedMemory
from hydraflow.workers.rollout import RolloutWorker

slow = pytest.mark.slow
RECEIVERS = 2


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of several buckets of a megabyte."""
    folder: Path = tmp_path_factory.mktemp("model") / "large"
    return str(make_model(folder, hidden=256, layers=4, heads=4, kv_heads=2))


@contextmanager
def linked(
    kind: type[SeparateProcesses], model: str, *, call: float = 60.0, recovery: bool = True
) -> Iterator[SeparateProcesses]:
    """Two actor ranks and two generation processes."""
    with Runtime(RayInitConfig(), Timeouts(start=120, call=call)) as runtime:
        runtime.start([ResourcePool("actor", [2]), ResourcePool("rollout", [RECEIVERS])])
        actor = runtime.group("actor", {"actor": RoleSpec(ChangingActor, (actor_spec(model),))})
        rollout = runtime.group("rollout", {"rollout": RoleSpec(RolloutWorker, (rollout_spec(model),))})
        runtime.await_ready()
        how = RolloutConfig(dtype="fp32", update_weights_bucket_megabytes=1, verify_weights_every=1)
        link = kind(rollout.role("rollout"), actor.role("actor"), how)
        if recovery:
            rollout.recovery = Recovery(link.restore, how.max_retries)
        yield link


def changed(link: SeparateProcesses, version: int) -> list[str | None]:
    """Publishes other weights than before; the first difference of each generation process."""
    link.actor.call(ChangingActor.change, 0.01)
    link.publish(version)()
    return differences(link)


def differences(link: SeparateProcesses) -> list[str | None]:
    return [link.first_difference(replica) for replica in range(RECEIVERS)]


def later(seconds: float, pid: int, *signals: signal.Signals) -> None:
    """Sends the signals from a thread."""

    def send() -> None:
        time.sleep(seconds)
        for one in signals:
            os.kill(pid, one)

    threading.Thread(target=send, daemon=True).start()


@slow
@pytest.mark.parametrize("kind", [SharedMemory, Broadcast])
def test_every_publish_arrives_and_a_process_that_dies_is_replaced(
    kind: type[SeparateProcesses], ray_session: None, large: str
) -> None:
    with linked(kind, large) as link:
        for version in range(3):
            assert changed(link, version) == [None, None]
        link.actor.call(ChangingActor.change, 0.01)
        assert None not in differences(link)
        assert changed(link, 3) == [None, None]
        group = link.rollout.group
        os.kill(group.processes[1].pid, signal.SIGKILL)  # while idle
        assert differences(link) == [None, None] and group.replaced == 1
        assert changed(link, 4) == [None, None]
        os.kill(group.processes[0].pid, signal.SIGSTOP)  # so that it dies in the middle of a broadcast
        later(2.0, group.processes[0].pid, signal.SIGKILL)
        assert changed(link, 5) == [None, None] and group.replaced == 2


@slow
@pytest.mark.parametrize(("kind", "method"), [(SharedMemory, "read_weights"), (Broadcast, "receive_weights")])
def test_a_process_that_hangs_is_named(
    kind: type[SeparateProcesses], method: str, ray_session: None, large: str
) -> None:
    with linked(kind, large, call=12.0, recovery=False) as link:
        link.publish(0)()
        stopped = link.rollout.group.processes[1].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerError, match=rf"rollout rank 1 .*{method}.*no answer in 12 s"):
                link.publish(1)()
        finally:
            os.kill(stopped, signal.SIGKILL)


@pytest.mark.parametrize(("nodes", "same"), [(["a", "a"], True), (["a", "b"], False), (["b", "b"], False)])
def test_weights_are_broadcast_where_a_generation_process_is_on_another_node(
    nodes: list[str], same: bool
) -> None:
    def role(*names: str) -> Any:
        processes = {rank: SimpleNamespace(node_id=name) for rank, name in enumerate(names)}
        return SimpleNamespace(group=SimpleNamespace(processes=processes))

    assert _on_one_node(role("a", "b"), role(*nodes)) == same
