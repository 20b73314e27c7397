"""How the generation engine gets the actor's weights: within a process, in buckets between processes of a
node, or by a broadcast to other nodes.

In: the groups of both. Out: weights of a version that the generation engine holds, or an error; the actor's
are unchanged either way. On a node the bytes stay in Ray's object store, which is shared memory; the
controller passes references. To other nodes the actor broadcasts them in a process group of its own. At most
two buckets are in use at a time: one is loaded while the next is made. Ray frees their memory some
milliseconds later, so that of small buckets is taken three or four times (`scripts/bench/weight_sync.py`
measures it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hydraflow.dispatch.group import Recovery, RoleGroup
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.dispatch.transport import StoredValue
from hydraflow.errors import GuardStop
from hydraflow.generation.config import GENERATION_ENGINES, RolloutConfig
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.rollout import RolloutWorker

MEGABYTE = 2**20
NO_VERSION = -1
"""Nothing has been published."""


class WeightLink(Protocol):
    """Hands weights over."""

    def publish(self, version: int) -> Callable[[], None]:
        """Sends the actor's weights, after all updates called before. Returns a function that waits until the
        generation engine holds them."""

    def first_difference(self, replica: int) -> str | None:
        """The first weight of a generation process that is not the actor's; None: all are, or it sleeps
        and the checksums of the first publish said so, or its engine does not give them back."""

    def sampled(self) -> None:
        """The generation engine is not needed until the next publish."""


def load_model_directory(rollout: RoleGroup, max_retries: int) -> None:
    """Gives the generation engine the weights of its model directory, for a run that trains nothing; also
    processes that take the place of others."""
    rollout.call(RolloutWorker.load_weights)

    def restore(rank: int) -> None:
        loading: Future = rollout.call_rank(rank, RolloutWorker.load_weights)
        loading.get()

    rollout.group.recovery = Recovery(restore, max_retries)


class NoRollout:
    """The link of a run that samples nothing."""

    def publish(self, version: int) -> Callable[[], None]:
        """See `WeightLink`."""
        return lambda: None

    def first_difference(self, replica: int) -> str | None:
        """See `WeightLink`."""
        return None

    def sampled(self) -> None:
        """See `WeightLink`."""


@dataclass
class SameProcess:
    """Every process of the generation engine also holds the actor."""

    rollout: RoleGroup

    def publish(self, version: int) -> Callable[[], None]:
        """See `WeightLink`."""
        sent: Future = self.rollout.call(RolloutWorker.sync_from_actor, version)
        return sent.get

    def first_difference(self, replica: int) -> str | None:
        """See `WeightLink`."""
        found: str | None = self.rollout.call(RolloutWorker.first_difference_from_actor)[replica]
        return found

    def sampled(self) -> None:
        """See `WeightLink`: it stays as it is."""


@dataclass
class ObjectStore:
    """Actor and generation engine are in different processes."""

    actor: RoleGroup
    rollout: RoleGroup
    config: RolloutConfig
    beside: Sequence[str] = ()
    """Roles in other processes on the rollout's devices: it sleeps while they work."""
    processes_per_replica: int = 1
    published: int = field(default=0, init=False)
    """Publishes so far."""
    _version: int = field(default=NO_VERSION, init=False)
    _sending: bool = field(default=False, init=False)
    """Whether weights are on their way to all generation processes."""
    _sleeps: bool = field(default=False, init=False)
    _asked: Future = field(default_factory=lambda: CompletedFuture(None), init=False)
    """The bucket that the actor makes. Nothing else holds it, so its memory is free once it is loaded."""

    def publish(self, version: int) -> Callable[[], None]:
        """See `WeightLink`. The first bucket is asked for at once, the others while the caller waits."""
        after_first_sleep = self.published == 1 and bool(self.beside)
        due = self.published % self.config.verify_weights_every == 0 or after_first_sleep
        checked = due and self._reads_back
        self.published += 1
        self._version, self._sending, self._sleeps = version, True, False
        self._start(checked)
        return partial(self._arrive, checked)

    def first_difference(self, replica: int) -> str | None:
        """See `WeightLink`."""
        if self._sleeps or not self._reads_back:
            return None
        compared: list[Future] = []

        def compare(bucket: StoredValue) -> Future:
            # on all ranks: an engine on several devices puts its weights together
            compared.append(self.rollout.call(RolloutWorker.first_difference_in_bucket, bucket))
            return compared[-1]

        self._ask(0, False)
        self._send(False, compare)
        rank = replica * self.processes_per_replica
        found: list[str] = [name for future in compared if (name := future.get()[rank]) is not None]
        return found[0] if found else None

    def sampled(self) -> None:
        """See `WeightLink`."""
        if self.beside:
            self._sleeps = True
            self.rollout.call(RolloutWorker.sleep, self.beside)

    def restore(self, rank: int) -> None:
        """Gives a new process of the generation engine the weights that the others hold. While all of them
        are being sent it does nothing: they are sent once more."""
        if not self._sending and not self._sleeps and self._version != NO_VERSION:
            load = partial(self.rollout.call_rank, rank, RolloutWorker.load_bucket)
            self._ask(0, self._reads_back)
            self._send(self._reads_back, load)

    @property
    def _reads_back(self) -> bool:
        """Whether the engine's weights can be compared with what was sent."""
        return GENERATION_ENGINES[self.config.name].reads_back

    def _start(self, checked: bool) -> None:
        """Begins to send the weights to all generation processes."""
        self._ask(0, checked)

    def _finish(self, checked: bool) -> bool:
        """Sends them; False when a generation process was replaced meanwhile."""
        return self._send(checked, partial(self.rollout.call, RolloutWorker.load_bucket))

    def _arrive(self, checked: bool) -> None:
        for _ in range(self.config.max_retries + 1):
            if self._finish(checked):
                self._sending = False
                return
            self._start(checked)
        raise GuardStop(
            f"generation processes died, or were not reached, {self.config.max_retries + 1} times while"
            f" weights of version {self._version} were sent;"
            f" actor_rollout_ref.rollout.max_retries={self.config.max_retries}"
        )

    def _send(self, checked: bool, load: Callable[[StoredValue], Future]) -> bool:
        """Sends all buckets, of which the first has been asked for. False when a generation process was
        replaced meanwhile."""
        replaced = self.rollout.group.replaced
        loading: Future = CompletedFuture(None)
        number, is_last = 0, False
        while not is_last:
            bucket, is_last = self._asked.get()[0]
            self._asked = CompletedFuture(None)
            loading.get()  # the bucket before this one
            if self.rollout.group.replaced != replaced:
                return False
            loading = load(bucket)
            del bucket  # it is gone once it is loaded
            number += 1
            if not is_last:
                self._ask(number, checked)
        loading.get()
        return self.rollout.group.replaced == replaced

    def _ask(self, number: int, checked: bool) -> None:
        self._asked = self.actor.call(ActorWorker.send_bucket, number, *self._how(checked))

    def _how(self, checked: bool) -> tuple[int, int, str, bool]:
        size, dtype = self.config.update_weights_bucket_megabytes * MEGABYTE, self.config.dtype
        return self._version, size, dtype, checked


class Broadcast(ObjectStore):
    """Some generation processes are on other nodes than the actor's rank 0. What concerns one process alone
    still goes through the object store."""

    _joined: int | None = None
    """How many generation processes had been replaced when all joined the group; None: there is none."""

    def _start(self, checked: bool) -> None:
        """Nothing: a process that waits for others in a collective can do nothing else, so it begins once
        all are free."""

    def _finish(self, checked: bool) -> bool:
        replaced = self.rollout.group.replaced
        if self._joined != replaced and not self._join():
            return False
        receiving: Future = self.rollout.call(RolloutWorker.receive_weights)
        sending: Future = self.actor.call(ActorWorker.broadcast_weights, *self._how(checked))
        arrived = [*receiving.get(), *sending.get()]
        if not all(arrived):
            self._joined = None
        return all(arrived) and self.rollout.group.replaced == replaced

    def _join(self) -> bool:
        """Makes a group of the actor's rank 0 and all generation processes."""
        self._joined, replaced = None, self.rollout.group.replaced
        address, port = self.actor.call(ActorWorker.open_weights_group)
        size = self.rollout.world_size + 1
        receivers: Future = self.rollout.call(RolloutWorker.join_weights_group, address, port, size)
        sender: Future = self.actor.call(ActorWorker.join_weights_group, size)
        if all([*receivers.get(), sender.get()]):
            self._joined = replaced
        return self._joined is not None
