"""Workers in this process: what the modes do is tested in test_modes.py, on a group of this kind as well;
here is the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dispatch import trace_format
from dispatch.probes import Described, Misconfigured, Probe, Troubled

from hydraflow.dispatch.config import RayInitConfig, RuntimeEnvConfig
from hydraflow.dispatch.group import Group, Timeouts
from hydraflow.dispatch.local import LocalRuntime
from hydraflow.dispatch.modes import Dispatch, register
from hydraflow.dispatch.placement import ResourcePool
from hydraflow.dispatch.shards import CompletedFuture
from hydraflow.dispatch.worker import ProcessContext, RoleSpec, Worker
from hydraflow.errors import ConfigError
from hydraflow.protocol.batch import DataProto

BatchOf = Callable[[int], DataProto]


def unpack_all(**settings: str) -> LocalRuntime:
    runtime = LocalRuntime(RayInitConfig(**settings), Timeouts(start=60, call=60))
    runtime.start([ResourcePool("pool", [1], threads=2), ResourcePool("score", [1])])
    return runtime


class Keeper(Worker):
    """Remembers what it was given and what it gave."""

    def __init__(self, process: ProcessContext, settings: dict[str, int]):
        super().__init__(process)
        self.settings, self.kept, self.closed = settings, torch.zeros(2), False

    @register(Dispatch.DP_COMPUTE_PROTO)
    def give(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"kept": self.kept}, {"text": ["a", "b"]})

    @register(Dispatch.ONE_TO_ALL)
    def change(self) -> None:
        self.kept += 1
        self.settings["n"] += 1

    @register(Dispatch.RANK_ZERO)
    def threads(self) -> int:
        return torch.get_num_threads()

    def close(self) -> None:
        self.closed = True


def test_what_a_worker_gave_does_not_change_with_the_worker(batch_of: BatchOf) -> None:
    """As if it were in the object store; and the settings that it was built with are its own."""
    settings = {"n": 1}
    group = unpack_all().group("pool", {"keeper": RoleSpec(Keeper, (settings,))})
    role = group.role("keeper")
    given = role.call(Keeper.give, batch_of(2))
    role.call(Keeper.change)
    assert role.fetch(given).get("kept").tolist() == [0.0, 0.0]
    assert settings == {"n": 1}
    assert list(role.fetch(given.select(["text"], [], [])).get("text")) == ["a", "b"], (
        "row objects are columns of the answer"
    )


def test_a_worker_that_writes_into_its_arguments_spoils_nothing(local: Group, batch_of: BatchOf) -> None:
    role, batch = local.role("probe"), batch_of(3)
    spoilt = role.call(Probe.spoil, batch)
    assert role.fetch(spoilt).get("x").tolist() == [100, 101, 102] and batch.get("x").tolist() == [0, 1, 2]
    again = role.call(Probe.spoil, spoilt)
    assert role.fetch(again).get("x").tolist() == [200, 201, 202] and role.fetch(spoilt).get(
        "x"
    ).tolist() == [100, 101, 102]


def test_a_call_that_would_not_wait_is_made_at_once_and_can_be_passed_on(
    local: Group, batch_of: BatchOf
) -> None:
    role = local.role("probe")
    later = role.call(Probe.double_later, batch_of(2))
    assert isinstance(later, CompletedFuture) and role.fetch(later.get()).get("y").tolist() == [0, 2]
    assert role.fetch(role.call(Probe.apply, lambda data: data, later)).get("y").tolist() == [0, 2]
    assert [group_of for group_of in role.call(Probe.peer_offset, "other")] == [7]


def test_columns_of_a_batch_that_is_there_are_passed_on(local: Group, batch_of: BatchOf) -> None:
    """As on Ray, where the process that needs the columns waits for them."""
    role = local.role("probe")
    later = role.call(Probe.double_later, batch_of(2))
    chosen = later.columns("y")
    assert list(chosen.keys()) == ["y"] and set(later.get().keys()) > {"y"}
    assert role.fetch(role.call(Probe.apply, lambda data: data, chosen)).get("y").tolist() == [0, 2]


def test_variables_are_set_and_the_port_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HYDRAFLOW_TEST_COLOUR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_MODULES_CACHE"):
        monkeypatch.setenv(name, "red")  # what the runtime sets is taken back after the test
    runtime = LocalRuntime(
        RayInitConfig(runtime_env=RuntimeEnvConfig({"HYDRAFLOW_TEST_COLOUR": 7})), Timeouts(start=60, call=60)
    )
    runtime.start([ResourcePool("pool", [1])])
    role = runtime.group("pool", {"described": RoleSpec(Described)}).role("described")
    (found,) = role.call(Described.surroundings)
    assert found["HYDRAFLOW_TEST_COLOUR"] == "7" and found["port"] == "held"
    assert Path(found["TRITON_CACHE_DIR"]).name == "rank_0"


def test_each_pool_computes_with_its_own_threads() -> None:
    runtime = unpack_all()
    many, one = (
        runtime.group(pool, {"keeper": RoleSpec(Keeper, ({},))}).role("keeper") for pool in ("pool", "score")
    )
    assert [many.call(Keeper.threads), one.call(Keeper.threads), many.call(Keeper.threads)] == [2, 1, 2]


def test_an_exception_is_the_workers_own() -> None:
    role = unpack_all().group("pool", {"troubled": RoleSpec(Troubled)}).role("troubled")
    with pytest.raises(ZeroDivisionError, match="bad number on rank 0") as caught:
        role.call(Troubled.fail_before_collective, 0)
    assert caught.traceback[-1].name == "fail_before_collective"
    with pytest.raises(ConfigError, match="model.path=/nowhere/0"):
        unpack_all().group("pool", {"wrong": RoleSpec(Misconfigured)})


def test_several_processes_are_refused() -> None:
    runtime = LocalRuntime(RayInitConfig(), Timeouts())
    with pytest.raises(ConfigError, match="the pool train has 2") as caught:
        runtime.start([ResourcePool("train", [2])])
    assert "trainer.n_gpus_per_node=1" in caught.value.problems[0].remedy


def test_stopping_closes_the_workers_and_writes_the_timeline(tmp_path: Path, batch_of: BatchOf) -> None:
    runtime = unpack_all(timeline_file=str(tmp_path / "t.json"))
    group = runtime.group("pool", {"keeper": RoleSpec(Keeper, ({},))})
    (keeper,) = group.workers.values()  # type: ignore[attr-defined]
    runtime.await_ready()
    group.role("keeper").call(Keeper.give, batch_of(2))
    runtime.stop()
    runtime.stop()
    assert keeper.closed
    trace = json.loads((tmp_path / "t.json").read_text())
    trace_format.check(trace)
    assert [event["name"] for event in trace_format.spans(trace, "keeper")] == ["start", "give"]


def test_what_is_counted(batch_of: BatchOf) -> None:
    runtime = unpack_all()
    role = runtime.group("pool", {"probe": RoleSpec(Probe)}).role("probe")
    before = runtime.traffic()
    role.call(Probe.double_later, batch_of(2), seconds=0.05)
    after = runtime.traffic()
    assert after.total == 0 and after.worked_since(before, "probe") >= 0.05
    assert role.call(Probe.size_of, np.zeros(3)) == [24]


class Careless(Worker):
    """Keeps and changes what it gets, and gives away what it keeps."""

    def __init__(self, process: ProcessContext, fails: bool = False):
        super().__init__(process)
        self.kept, self.fails = {"n": 1}, fails

    @register(Dispatch.RANK_ZERO)
    def count(self, into: list[int]) -> dict[str, int]:
        into.append(1)
        self.kept["n"] += len(into)
        return self.kept

    @register(Dispatch.RANK_ZERO)
    def facts(self, data: DataProto) -> DataProto:
        data.meta_info["list"].append(1)
        return data

    def close(self) -> None:
        if self.fails:
            raise OSError("it does not close")
        CLOSED.append(self)


CLOSED: list[Worker] = []


def test_arguments_and_answers_are_copies() -> None:
    runtime = unpack_all()
    role = runtime.group("pool", {"careless": RoleSpec(Careless)}).role("careless")
    given: list[int] = []
    first, second = role.call(Careless.count, given), role.call(Careless.count, given)
    assert given == [] and (first, second) == ({"n": 2}, {"n": 3})
    data = DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"list": []})
    assert role.call(Careless.facts, data).meta_info == {"list": [1]} and data.meta_info == {"list": []}
    runtime.stop()


def test_a_worker_that_does_not_close_keeps_no_other_open() -> None:
    runtime = unpack_all()
    roles = {"one": RoleSpec(Careless), "bad": RoleSpec(Careless, (True,)), "other": RoleSpec(Careless)}
    group = runtime.group("pool", roles)
    runtime.group("score", {"last": RoleSpec(Careless)})
    CLOSED.clear()
    with pytest.raises(OSError, match="it does not close"):
        runtime.stop()
    assert len(CLOSED) == 3 and not group.workers  # type: ignore[attr-defined]
