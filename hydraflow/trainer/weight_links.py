"""Transfers the actor's weights to the generation engine: within a process, through shared memory between
processes of a node, or by a broadcast to other nodes.

In: the groups of both. Out: the generation engine holds the weights of a version, or an error; the actor's
are unchanged either way. On a node the bytes are in two slots of shared memory, which the processes hand to
one another (`workers/weights_shared.py`). To other nodes the actor broadcasts them in a dedicated process
group (`workers/weights_broadcast.py`). At most two buckets exist at a time: while one is loaded, the actor
fills the next, gathering its tensors if they are sharded (`scripts/bench/weight_sync.py` measures it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

from hydraflow.dispatch.group import Recovery, RoleGroup
from hydraflow.dispatch.shards import Future
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig, bucket_bytes
from hydraflow.models.adapters import Form
from hydraflow.trainer.turns import Turns
from hydraflow.workers.actor import ActorWorker, SendOptions
from hydraflow.workers.rollout import RolloutWorker
from hydraflow.workers.weights_transfer import Received

NO_VERSION = -1
"""No weights have been published yet."""
Transfer = tuple[Future, Callable[[], bool]]


class WeightLink(Protocol):
    """Transfers weights from the actor to the generation engine."""

    def publish(self, version: int) -> Callable[[], None]:
        """Sends the actor's weights, after all updates that were called before. Returns a function that waits
        until the generation engine holds them."""

    def first_difference(self, replica: int) -> str | None:
        """The first weight of a generation process that differs from the actor's. None: none differs, or they
        cannot be read, because the process sleeps (the first publish compared checksums) or its engine does
        not support it."""


@dataclass
class _Sleeps:
    """A `Sleeper` without `wake`: a generation engine sleeps until weights arrive."""

    rollout: RoleGroup
    turns: Turns = field(default_factory=Turns, kw_only=True)
    sleeps: bool = field(default=False, init=False)

    def sleep(self) -> None:
        self.sleeps = True  # first: the replacement of a process that dies in the call gets no weights
        self.rollout.call(RolloutWorker.sleep)


class ModelDirectory(_Sleeps):
    """The weights of the model directory, for a run that trains nothing."""

    def wake(self) -> None:
        self.sleeps = False
        with self.turns.together("rollout"):
            self.rollout.call(RolloutWorker.load_weights)

    def restore(self, rank: int) -> None:
        """Loads the weights into a replacement process."""
        if not self.sleeps:
            loading: Future = self.rollout.call_rank(rank, RolloutWorker.load_weights)
            loading.get()


def load_model_directory(rollout: RoleGroup, max_retries: int, turns: Turns | None = None) -> ModelDirectory:
    """Loads the weights of the model directory into the generation engine; later also into replacement
    processes."""
    weights = ModelDirectory(rollout, turns=turns or Turns())
    weights.wake()
    rollout.group.recovery = Recovery(weights.restore, max_retries)
    return weights


class NoRollout:
    """The `WeightLink` of a run that samples nothing."""

    def publish(self, version: int) -> Callable[[], None]:
        return lambda: None

    def first_difference(self, replica: int) -> str | None:
        return None


@dataclass
class SameProcess(_Sleeps):
    """A `WeightLink` where every process of the generation engine also holds the actor."""

    _version: int = field(default=NO_VERSION, init=False)

    def publish(self, version: int) -> Callable[[], None]:
        self.sleeps, self._version = False, version
        with self.turns.together("actor", "rollout"):
            sent: Future = self.rollout.call(RolloutWorker.sync_from_actor, version)
        return sent.get

    def first_difference(self, replica: int) -> str | None:
        if self.sleeps:
            return None
        return self.rollout.call(RolloutWorker.first_difference_from_actor)[replica]

    def wake(self) -> None:
        self.publish(self._version)()


@dataclass
class SeparateProcesses(_Sleeps, ABC):
    """A `WeightLink` between different processes."""

    actor: RoleGroup
    config: RolloutConfig
    processes_per_replica: int = 1
    adapters: bool = False
    """Whether adapters are sent apart from the base weights, not merged into them."""
    published: int = field(default=0, init=False)
    """Number of publishes, including those that wake the generation engine."""
    _version: int = field(default=NO_VERSION, init=False)
    _sending: bool = field(default=False, init=False)
    """Whether a transfer to all generation processes is in progress."""
    _has_woken: bool = field(default=False, init=False)
    """Whether a sleeping engine has been woken before."""
    _reached: bool = field(default=False, init=False)
    """Whether the last transfer has reached all its receivers."""
    _based_at: int | None = field(default=None, init=False)
    """With adapters: number of replaced generation processes when all of them last got the base weights;
    None: not yet. Engines keep base weights while they sleep."""

    @abstractmethod
    def _begin(self, checked: bool, compare: bool, ranks: Sequence[int]) -> Transfer | None:
        """Starts sending the weights to these generation processes, to be loaded or compared. Returns the
        future of their answers, and a function that waits for the actor and returns whether it reached all of
        them. None: some cannot be reached."""

    def publish(self, version: int) -> Callable[[], None]:
        """The transfer starts when the caller waits: processes block until their peers join, so all must be
        free first."""
        after_first_sleep = self.sleeps and not self._has_woken
        due = self.published % self.config.verify_weights_every == 0 or after_first_sleep
        checked = due and self._reads_back
        self.published += 1
        self._has_woken |= self.sleeps
        self._version, self._sending, self.sleeps = version, True, False
        return partial(self._deliver_to_all, checked)

    def first_difference(self, replica: int) -> str | None:
        if self.sleeps or not self._reads_back:
            return None
        self._sending = True
        try:
            found = self._deliver(False, self._all_ranks, compare=True)
        finally:
            self._sending = False
        return found[replica * self.processes_per_replica]

    def wake(self) -> None:
        self.publish(self._version)()

    def restore(self, rank: int) -> None:
        """Sends the current weights to a replacement process of the generation engine. Does nothing during a
        transfer to all, which will be repeated."""
        if not self._sending and not self.sleeps and self._version != NO_VERSION:
            self._deliver(self._reads_back, [rank])

    @property
    def _reads_back(self) -> bool:
        """Whether the engine's weights can be compared with what was sent."""
        return GENERATION_ENGINES[self.config.name].reads_back

    @property
    def _all_ranks(self) -> Sequence[int]:
        return range(self.rollout.world_size)

    @cached_property
    def _see_the_senders_device(self) -> list[bool]:
        """By rank, whether a generation process sees the sender's GPU; empty on a CPU."""
        identity = self.actor.call(ActorWorker.sending_device)
        return self.rollout.call(RolloutWorker.sees_device, identity) if identity else []

    def _deliver_to_all(self, checked: bool) -> None:
        try:
            self._deliver(checked, self._all_ranks)
        finally:
            self._sending = False
        self._based_at = self.rollout.group.replaced

    def _deliver(self, checked: bool, ranks: Sequence[int], *, compare: bool = False) -> list[str | None]:
        """Sends the weights to these generation processes, to be loaded or compared; retries when a process
        was replaced or not reached meanwhile. Returns the first difference of each."""
        for _ in range(self.config.max_retries + 1):
            with self.turns.together("actor", "rollout"):
                found = self._attempt(checked, compare, ranks)
            if found is not None:
                return found
            if compare:  # a replacement process holds nothing yet
                self._deliver(checked, ranks)
        cause = (
            f"generation processes died, or were not reached, {self.config.max_retries + 1} times while"
            f" weights of version {self._version} were sent;"
            f" actor_rollout_ref.rollout.max_retries={self.config.max_retries}"
        )
        raise self.rollout.failed(ranks[0], "read_weights", cause)

    def _attempt(self, checked: bool, compare: bool, ranks: Sequence[int]) -> list[str | None] | None:
        """One attempt of `_deliver`; None when a process was replaced or not reached meanwhile."""
        replaced = self.rollout.group.replaced
        transfer = self._begin(checked, compare, ranks)
        if transfer is None:
            return None
        self._reached = False
        receiving, sent = transfer
        received: list[Received | None] = receiving.get()
        found = [one.difference for one in received if one is not None]
        self._reached = sent() and len(found) == len(ranks)
        return found if self._reached and self.rollout.group.replaced == replaced else None

    def _ask(self, ranks: Sequence[int], method: Callable[..., Any], *values: Any) -> Future:
        """A future of the answers of these generation processes."""
        if len(ranks) == self.rollout.world_size:
            return self.rollout.call(method, *values)
        [rank] = ranks
        return self.rollout.call_rank(rank, method, *values)

    def _options(self, checked: bool, compare: bool) -> SendOptions:
        """Adapters are sent alone once all generation processes hold the base weights, unless all weights are
        to be checked or compared."""
        form = Form.MERGED
        if self.adapters:
            held = self._based_at == self.rollout.group.replaced
            form = Form.ADAPTERS if held and not (checked or compare) else Form.APART
        return SendOptions(self._version, bucket_bytes(self.config), self.config.dtype, checked, form)


@dataclass
class SharedMemory(SeparateProcesses):
    """The link if all generation processes are on the node of the actor's rank 0. Buckets are in host memory,
    or on its GPU if all of them see it."""

    _place: str = field(default="", init=False)
    """Address at which the actor listens for the next receivers; empty: unknown."""

    def _begin(self, checked: bool, compare: bool, ranks: Sequence[int]) -> Transfer:
        seen = self._see_the_senders_device
        on_device = bool(seen) and all(seen)
        place: str = self._place or self.actor.call(ActorWorker.open_weights_listener)
        self._place = ""
        reading = self._ask(ranks, RolloutWorker.read_weights, place, compare)
        options = self._options(checked, compare)
        sharing: Future = self.actor.call(ActorWorker.share_weights, ranks, on_device, options)

        def sent() -> bool:
            whole, self._place = sharing.get()[0]
            return bool(whole)

        return reading, sent


@dataclass
class Broadcast(SeparateProcesses):
    """The link if some generation processes are on other nodes than the actor's rank 0. Buckets are in host
    memory, or on the GPUs if no receiver sees the sender's."""

    _joined: tuple[int, Sequence[int]] | None = field(default=None, init=False)
    """Number of replaced generation processes when the group was joined, and its members; None: there is no
    group."""

    def _begin(self, checked: bool, compare: bool, ranks: Sequence[int]) -> Transfer | None:
        joined = self.rollout.group.replaced, ranks
        if not (self._reached and self._joined == joined) and not self._join(ranks):
            return None
        receiving = self._ask(ranks, RolloutWorker.receive_weights, compare)
        sending: Future = self.actor.call(ActorWorker.broadcast_weights, self._options(checked, compare))
        return receiving, lambda: bool(sending.get()[0])

    def _join(self, ranks: Sequence[int]) -> bool:
        """Creates the process group of the actor's rank 0 and these generation processes."""
        self._joined, replaced = None, self.rollout.group.replaced
        place = self.actor.call(ActorWorker.open_weights_group, self._on_device)
        join = RolloutWorker.join_weights_group
        receivers = self._ask(ranks, join, *place, ranks, self._on_device)
        sender: Future = self.actor.call(ActorWorker.join_weights_group, 1 + len(ranks))
        if all([*receivers.get(), sender.get()]):
            self._joined = replaced, ranks
        return self._joined is not None

    @property
    def _on_device(self) -> bool:
        return bool(self._see_the_senders_device) and not any(self._see_the_senders_device)
