"""Hands prompts to the replicas of a generation engine that have processes of their own, prompt by prompt.

In: prompts, and how each is sampled. Out: the trajectories of all of them, in the prompts' order. All samples
of a prompt go to one replica, which computes the prompt once: the one with the fewest tokens in flight. A
replica gets no more than its engine decodes at a time; what it has ended comes back while it goes on, and
makes room for the next prompts, so none is idle while prompts wait. The process that takes the place of one
that died gets its prompts again. Left out on purpose: what is sampled, which does not depend on where (draw
keys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hydraflow.dispatch.future import await_any
from hydraflow.dispatch.group import RoleGroup, WorkerGroup
from hydraflow.dispatch.shards import Future, split
from hydraflow.errors import WorkerError
from hydraflow.protocol.batch import DataProto
from hydraflow.protocol.ragged import lengths
from hydraflow.protocol.remote import RemoteBatch
from hydraflow.workers.rollout import RolloutSpec, RolloutWorker, SamplingSpec


@dataclass
class Dealer:
    """Which prompts each replica has in flight; the others wait.

    >>> dealer = Dealer([9, 2, 2, 2, 2], samples=1, replicas=2, rows=1)
    >>> dealer.deal([0, 1])
    {0: [0, 3], 1: [1, 2]}
    >>> dealer.ended(1, [2])
    >>> dealer.deal([1]), dealer.all_dealt
    ({1: [4]}, True)
    """

    tokens: Sequence[int]
    """Of each prompt with its responses, at their longest."""
    samples: int
    """Responses per prompt."""
    replicas: int
    rows: int
    """Responses that one replica decodes at a time. It gets one prompt more, so that it has work while its
    answer travels."""
    waiting: list[int] = field(init=False)
    flying: list[set[int]] = field(init=False)
    """By replica."""

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.tokens)))
        self.flying = [set() for _ in range(self.replicas)]

    @property
    def all_dealt(self) -> bool:
        """Whether no prompt waits."""
        return not self.waiting

    def deal(self, free: Sequence[int]) -> dict[int, list[int]]:
        """What each of the `free` replicas gets now, by replica: prompt after prompt to the one with the
        fewest tokens in flight that has room."""
        dealt: dict[int, list[int]] = {}
        while self.waiting and (open_ones := [one for one in free if self._has_room(one)]):
            least = min(open_ones, key=lambda one: (self._tokens(one), one))
            prompt = self.waiting.pop(0)
            self.flying[least].add(prompt)
            dealt.setdefault(least, []).append(prompt)
        return dealt

    def ended(self, replica: int, prompts: Sequence[int]) -> None:
        """All samples of these prompts are there."""
        self.flying[replica] -= set(prompts)

    def _has_room(self, replica: int) -> bool:
        return len(self.flying[replica]) * self.samples <= self.rows

    def _tokens(self, replica: int) -> int:
        return sum(self.tokens[prompt] for prompt in self.flying[replica])


class Router:
    """Samples with several replicas."""

    def __init__(self, rollout: RoleGroup, spec: RolloutSpec):
        """rollout: a group that holds no other role."""
        self.rollout, self.spec = rollout, spec
        self.replicas = rollout.world_size // spec.tensor_parallel

    @classmethod
    def of(cls, rollout: RoleGroup) -> Router | None:
        """None where one call for all replicas does as well: there is one, or other roles share its process,
        so that all wait for the last of them anyway."""
        (spec,) = rollout.group.roles[rollout.name].args
        alone = len(rollout.group.roles) == 1
        return cls(rollout, spec) if alone and rollout.world_size > spec.tensor_parallel else None

    def sample(self, prompts: DataProto, how: SamplingSpec) -> RemoteBatch:
        """All samples of all prompts, prompt by prompt; `prompts` as for `RolloutWorker.generate`.
        WorkerError when the processes that have the same prompt die too often."""
        tokens = (lengths(prompts.get("prompts")) + self.spec.max_tokens) * how.n
        dealer = Dealer(tokens.tolist(), how.n, self.replicas, self.spec.rollout.max_num_seqs)
        numbered = prompts.union(DataProto.from_dict({"group": torch.arange(len(prompts))}))
        busy: dict[int, list[Future]] = {}
        found: list[RemoteBatch] = []
        groups: list[int] = []
        deaths = [0] * self.replicas
        try:
            while len(groups) < len(prompts):
                self._hand_out(dealer, numbered, busy)
                replica = self._first(busy)
                [answer] = busy.pop(replica)[0].get()
                if answer is None:
                    deaths[replica] += 1
                    self._require_few(deaths[replica], replica)
                    again = sorted(dealer.flying[replica])
                    busy[replica] = self._advance(replica, numbered, again, dealer.all_dealt)
                    continue
                ended = answer.meta_info["groups"]
                found.append(replace(answer, meta_info={}))
                groups += ended
                dealer.ended(replica, ended)
        except BaseException:
            self._abandon([one for one in range(self.replicas) if dealer.flying[one]])
            raise
        rows = np.argsort(np.repeat(groups, how.n), kind="stable")
        return RemoteBatch.concat(found).select_idxs(rows)

    def _hand_out(self, dealer: Dealer, numbered: DataProto, busy: dict[int, list[Future]]) -> None:
        """Gives the free replicas what they have room for. Where nothing waits any more, they answer when
        they have ended everything."""
        free = [one for one in range(self.replicas) if one not in busy]
        dealt = dealer.deal(free)
        for replica in free:
            if dealer.flying[replica]:
                more = dealt.get(replica, [])
                busy[replica] = self._advance(replica, numbered, more, dealer.all_dealt)

    def _advance(self, replica: int, numbered: DataProto, more: list[int], to_the_end: bool) -> list[Future]:
        prompts = split(numbered[more], 1)[0] if more else None
        return self._call(replica, RolloutWorker.advance, prompts, to_the_end)

    def _call(self, replica: int, method: Callable[..., Any], *args: object) -> list[Future]:
        """A call to all processes of a replica; the first of them answers."""
        size = self.spec.tensor_parallel
        return [self.rollout.call_rank(replica * size + one, method, *args) for one in range(size)]

    @staticmethod
    def _first(busy: Mapping[int, list[Future]]) -> int:
        """A replica that has answered."""
        replicas = list(busy)
        return replicas[await_any([busy[replica][0] for replica in replicas])]

    def _require_few(self, deaths: int, replica: int) -> None:
        group, role = self.rollout.group, self.rollout.name
        assert group.recovery is not None and isinstance(group, WorkerGroup), "any other death ends the wait"
        if deaths > group.recovery.max_retries:
            cause = f"{deaths} processes died while they sampled the same prompts"
            where = group.rank_infos[replica]
            raise WorkerError(role=role, rank=replica, node=where.node, method="advance", cause=cause)

    def _abandon(self, replicas: Sequence[int]) -> None:
        """The engines of a group that goes on end what they have in flight."""
        if self.rollout.group.error is None:
            for replica in replicas:
                self._call(replica, RolloutWorker.abandon)
