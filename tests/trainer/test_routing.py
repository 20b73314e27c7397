"""Prompts are handed to replicas by tokens in flight; what is sampled does not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workers.by_hand import PROMPTS, SAMPLES, make_prompts, process, rollout_spec

from hydraflow.dispatch.group import Channel, Recovery, RoleGroup, WorkerGroup
from hydraflow.dispatch.modes import CallContext, PerRank, Registration
from hydraflow.dispatch.shards import CompletedFuture, Shard
from hydraflow.dispatch.worker import RoleSpec
from hydraflow.errors import GuardStop, WorkerError
from hydraflow.generation.config import SamplingConfig
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.remote import RemoteBatch, materialise
from hydraflow.trainer.routing import PromptBalancer, Router
from hydraflow.workers.rollout import RolloutWorker

SAMPLED = ("prompts", "responses", "response_mask", "rollout_log_probs", "lengths", "versions")


class Replicas(WorkerGroup):
    """Rollout workers in this process. `dies`: ranks that lose all they hold before each of that many calls
    of `advance`, as a process that takes the place of another."""

    def __init__(self, path: str, count: int, rows: int, dies: Mapping[int, int] | None = None):
        self.spec = replace(rollout_spec(path), rollout=SamplingConfig(dtype="fp32", max_num_seqs=rows))
        self.roles = {"rollout": RoleSpec(RolloutWorker, (self.spec,))}
        self.world_size, self.channel, self.dies = count, Channel(), dict(dies or {})
        self.rank_infos = [SimpleNamespace(node="here")] * count  # type: ignore[assignment]
        self.recovery = Recovery(lambda rank: None, max_retries=2)
        self.workers = [self.worker(rank) for rank in range(count)]
        self.calls: list[tuple[int, str]] = []
        self.error = None

    def worker(self, rank: int) -> RolloutWorker:
        worker = RolloutWorker(process(rank, self.world_size), self.spec)
        worker.load_weights()
        return worker

    def send(self, plan: Registration, context: CallContext, arguments: PerRank) -> CompletedFuture:  # type: ignore[override]
        rank, (positional, _) = context.only, arguments
        assert rank is not None
        self.calls.append((rank, context.method))
        if context.method == "advance" and self.dies.get(rank):
            self.dies[rank] -= 1
            self.workers[rank] = self.worker(rank)
            return CompletedFuture([None])
        args = [values[rank] for values in positional]
        args = [materialise(arg.batch, list) if isinstance(arg, Shard) else arg for arg in args]
        answer = getattr(self.workers[rank], context.method)(*args)
        batch = RemoteBatch.from_local(answer) if isinstance(answer, DataProto) else answer
        return CompletedFuture([batch])


def routed(group: Replicas, **changed: Any) -> DataProto:
    router = Router.of(RoleGroup(group, "rollout"))
    assert router is not None
    prompts = make_prompts(**changed)
    return materialise(router.sample(prompts, prompts.meta_info["sampling"]), list)


def as_lists(batch: DataProto, name: str) -> list[Any]:
    return [row.tolist() for row in batch.get(name).unbind()]


def test_the_replica_with_the_fewest_tokens_gets_the_next_prompt() -> None:
    balancer = PromptBalancer([50, *[10] * 6], samples=2, replicas=2, rows=4)
    assert balancer.assign([0, 1]) == {0: [0, 4, 5], 1: [1, 2, 3]}, "two prompts of two samples, and one more"
    balancer.ended(1, [1, 3])
    assert balancer.assign([1]) == {1: [6]} and balancer.all_assigned
    whole = PromptBalancer([8, 8], samples=16, replicas=1, rows=4)
    assert whole.assign([0]) == {0: [0]}, "a prompt's samples stay together, also above the limit"
    whole.ended(0, [0])
    assert whole.assign([0]) == {0: [1]}


@pytest.mark.parametrize("rows", [64, SAMPLES - 1])
def test_what_is_sampled_depends_on_no_route(tiny: str, rows: int) -> None:
    """With 64 rows all prompts are in flight at once; with fewer rows than a prompt's samples one after the
    other."""
    group = Replicas(tiny, 3, rows)
    expected = group.worker(0).generate(make_prompts())
    for repeated in range(2):  # nothing is left in flight
        found = routed(group)
        for name in SAMPLED:
            assert as_lists(found, name) == as_lists(expected, name), (name, repeated)
        assert found.get("finish_reason").tolist() == expected.get("finish_reason").tolist()
    owners = found.get("replica").reshape(len(PROMPTS), SAMPLES)
    assert torch.equal(owners, owners[:, :1].expand(-1, SAMPLES)), "a prompt's samples share a replica"
    assert set(owners[:, 0].tolist()) == {0, 1, 2}
    assert "groups" not in found.meta_info
    calls = [rank for rank, method in group.calls if method == "advance"]
    assert len(calls) == 2 * (3 if rows == 64 else len(PROMPTS))


def test_what_a_dead_process_had_is_sampled_again(tiny: str) -> None:
    expected = routed(Replicas(tiny, 2, 64))
    found = routed(Replicas(tiny, 2, 64, dies={1: 2}))
    for name in (*SAMPLED, "replica"):
        assert as_lists(found, name) == as_lists(expected, name)
    with pytest.raises(WorkerError, match="rollout rank 1 on node here.*3 processes died while they sampled"):
        routed(Replicas(tiny, 2, 64, dies={1: 3}))


def test_a_step_that_is_given_up_leaves_nothing_in_flight(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Replicas(tiny, 2, SAMPLES - 1)
    with monkeypatch.context() as patched:
        patched.setattr("hydraflow.trainer.routing.await_any", interrupt)
        with pytest.raises(KeyboardInterrupt):
            routed(group)
    assert group.calls[-2:] == [(0, "abandon"), (1, "abandon")]
    assert as_lists(routed(group), "responses") == as_lists(
        group.worker(0).generate(make_prompts()), "responses"
    )


def interrupt(futures: object) -> int:
    raise KeyboardInterrupt


def test_other_weights_than_promised_are_refused(tiny: str) -> None:
    with pytest.raises(GuardStop, match="weights of version 3, but holds version 0"):
        routed(Replicas(tiny, 2, 64), version=3)


def test_one_replica_or_shared_processes_get_one_call(tiny: str) -> None:
    assert Router.of(RoleGroup(Replicas(tiny, 1, 64), "rollout")) is None
    shared = Replicas(tiny, 2, 64)
    shared.roles["actor"] = shared.roles["rollout"]
    assert Router.of(RoleGroup(shared, "rollout")) is None
