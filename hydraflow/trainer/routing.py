"""Load balancing: assigns prompts to generation replicas that run in their own processes.

In: prompts, and their sampling parameters. Out: all trajectories, in the prompts' order. All samples of a
prompt go to the replica with the fewest tokens in flight, which prefills the prompt once. A replica gets no
more than its engine decodes at a time; finished prompts return while it continues, and make room for the
next, so no replica is idle while prompts wait. The replacement of a process that died gets its prompts again.
Samples do not depend on the replica that draws them (random keys).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hydraflow.dispatch.future import await_any
from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.shards import Future, split
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import lengths
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SamplingSpec


@dataclass
class PromptBalancer:
    """Tracks which prompts each replica has in flight; the others wait.

    >>> balancer = PromptBalancer([9, 2, 2, 2, 2], samples=1, replicas=2, rows=1)
    >>> balancer.assign([0, 1])
    {0: [0, 3], 1: [1, 2]}
    >>> balancer.ended(1, [2])
    >>> balancer.assign([1]), balancer.all_assigned
    ({1: [4]}, True)
    """

    tokens: Sequence[int]
    """Maximum tokens of each prompt with its responses."""
    samples: int
    """Responses per prompt."""
    replicas: int
    rows: int
    """Responses that one replica decodes at a time. It gets one extra prompt, so that it has work while its
    answer travels."""
    waiting: list[int] = field(init=False)
    in_flight: list[set[int]] = field(init=False)
    """By replica."""

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.tokens)))
        self.in_flight = [set() for _ in range(self.replicas)]

    @property
    def all_assigned(self) -> bool:
        """Whether every prompt has a replica."""
        return not self.waiting

    def assign(self, free: Sequence[int]) -> dict[int, list[int]]:
        """Prompts for each of the `free` replicas: each prompt goes to the replica with room and the fewest
        tokens in flight."""
        assigned: dict[int, list[int]] = {}
        while self.waiting and (with_room := [replica for replica in free if self._has_room(replica)]):
            least = min(with_room, key=lambda replica: (self._tokens(replica), replica))
            prompt = self.waiting.pop(0)
            self.in_flight[least].add(prompt)
            assigned.setdefault(least, []).append(prompt)
        return assigned

    def ended(self, replica: int, prompts: Sequence[int]) -> None:
        """Records that all samples of these prompts have arrived."""
        self.in_flight[replica] -= set(prompts)

    def _has_room(self, replica: int) -> bool:
        return len(self.in_flight[replica]) * self.samples <= self.rows

    def _tokens(self, replica: int) -> int:
        return sum(self.tokens[prompt] for prompt in self.in_flight[replica])


class Router:
    """Samples with several replicas. The group of `rollout` holds no other role."""

    def __init__(self, rollout: RoleGroup, spec: RolloutSpec):
        self.rollout, self.spec = rollout, spec
        self.replicas = rollout.world_size // spec.model_parallel

    @classmethod
    def of(cls, rollout: RoleGroup) -> Router | None:
        """A router; None if one call to all replicas is as good: there is only one, or other roles share its
        processes, so that all wait for the slowest anyway."""
        (spec,) = rollout.group.roles[rollout.name].args
        alone = len(rollout.group.roles) == 1
        return cls(rollout, spec) if alone and rollout.world_size > spec.model_parallel else None

    def sample(self, prompts: DataProto, how: SamplingSpec) -> RemoteBatch:
        """All samples of all prompts, prompt by prompt; `prompts` as for `RolloutWorker.generate`.
        WorkerError when processes with the same prompts die too often."""
        tokens = (lengths(prompts.get("prompts")) + self.spec.max_tokens) * how.n
        balancer = PromptBalancer(tokens.tolist(), how.n, self.replicas, self.spec.rollout.max_num_seqs)
        numbered = prompts.union(DataProto.from_dict({"group": torch.arange(len(prompts))}))
        busy: dict[int, list[Future]] = {}
        found: list[RemoteBatch] = []
        groups: list[int] = []
        deaths = [0] * self.replicas
        try:
            while len(groups) < len(prompts):
                self._assign(balancer, numbered, busy)
                replicas = list(busy)
                replica = replicas[await_any([busy[one][0] for one in replicas])]
                [answer] = busy.pop(replica)[0].get()
                if answer is None:  # its process died and was replaced
                    deaths[replica] += 1
                    self._require_retries_left(deaths[replica], replica)
                    again = sorted(balancer.in_flight[replica])
                    busy[replica] = self._advance(replica, numbered, again, balancer.all_assigned)
                    continue
                ended = answer.meta_info["groups"]
                found.append(replace(answer, meta_info={}))
                groups += ended
                balancer.ended(replica, ended)
        except BaseException:
            self._abandon([one for one in range(self.replicas) if balancer.in_flight[one]])
            raise
        rows = np.argsort(np.repeat(groups, how.n), kind="stable")
        return RemoteBatch.concat(found).select_idxs(rows)

    def _assign(self, balancer: PromptBalancer, numbered: DataProto, busy: dict[int, list[Future]]) -> None:
        """Assigns prompts to the free replicas. Once no prompt waits, replicas answer only when they have
        finished everything."""
        free = [one for one in range(self.replicas) if one not in busy]
        assigned = balancer.assign(free)
        for replica in free:
            if balancer.in_flight[replica]:
                more = assigned.get(replica, [])
                busy[replica] = self._advance(replica, numbered, more, balancer.all_assigned)

    def _advance(self, replica: int, numbered: DataProto, more: list[int], to_the_end: bool) -> list[Future]:
        prompts = split(numbered[more], 1)[0] if more else None
        return self._call(replica, RolloutWorker.advance, prompts, to_the_end)

    def _call(self, replica: int, method: Callable[..., Any], *args: object) -> list[Future]:
        """A call to all processes of a replica; the first of them answers."""
        size = self.spec.model_parallel
        return [self.rollout.call_rank(replica * size + one, method, *args) for one in range(size)]

    def _require_retries_left(self, deaths: int, replica: int) -> None:
        recovery = self.rollout.group.recovery
        assert recovery is not None, "any other death ends the wait"
        if deaths > recovery.max_retries:
            cause = f"{deaths} processes died while they sampled the same prompts"
            raise self.rollout.failed(replica, "advance", cause)

    def _abandon(self, replicas: Sequence[int]) -> None:
        """Aborts all requests in flight, so that the group stays usable."""
        if self.rollout.group.error is None:
            for replica in replicas:
                self._call(replica, RolloutWorker.abandon)
