"""How the generation engine gets the actor's weights: within a process, or in buckets between processes.

In: the groups of both. Out: weights of a version that the generation engine holds, or an error; the actor's
are unchanged either way. Between processes the bytes stay in Ray's object store, which is shared memory on a
node; the controller passes references. At most two buckets exist at a time: one is loaded while the next is
made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hydraflow.dispatch.group import RoleGroup
from hydraflow.dispatch.shards import CompletedFuture, Future
from hydraflow.workers.actor import ActorWorker
from hydraflow.workers.rollout import RolloutWorker

MEGABYTE = 2**20
NO_VERSION = -1
"""Of buckets that are only compared."""


class WeightLink(Protocol):
    """Hands weights over."""

    def publish(self, version: int) -> Callable[[], None]:
        """Sends the actor's weights, after all updates called before. Returns a function that waits until the
        generation engine holds them."""

    def first_difference(self, replica: int) -> str | None:
        """The first weight of a generation process that is not the actor's; None: all are."""


class NoRollout:
    """The link of a run that samples nothing."""

    def publish(self, version: int) -> Callable[[], None]:
        """See `WeightLink`."""
        return lambda: None

    def first_difference(self, replica: int) -> str | None:
        """See `WeightLink`."""
        return None


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


@dataclass
class ObjectStore:
    """Actor and generation engine are in different processes."""

    actor: RoleGroup
    rollout: RoleGroup
    bucket_megabytes: int
    dtype: str
    """Of the generation engine's weights."""
    verify_every: int
    """Every so many publishes checksums are compared, beginning with the first."""
    published: int = field(default=0, init=False)

    def publish(self, version: int) -> Callable[[], None]:
        """See `WeightLink`. The first bucket is asked for at once, the others while the caller waits."""
        checked = self.published % self.verify_every == 0
        self.published += 1
        return partial(self._rest, version, checked, self._ask(0, version, checked))

    def first_difference(self, replica: int) -> str | None:
        """See `WeightLink`."""
        number, first, is_last = 0, None, False
        while not is_last:
            bucket, is_last = self._ask(number, NO_VERSION, False).get()[0]
            found = self.rollout.call(RolloutWorker.first_difference_in_bucket, bucket).get()[replica]
            number, first = number + 1, first or found
        return first

    def _rest(self, version: int, checked: bool, asked: Future) -> None:
        loading: Future = CompletedFuture(None)
        number, is_last = 0, False
        while not is_last:
            bucket, is_last = asked.get()[0]
            loading.get()  # the bucket before this one
            loading = self.rollout.call(RolloutWorker.load_bucket, bucket)
            del bucket  # it is gone once it is loaded
            number += 1
            if not is_last:
                asked = self._ask(number, version, checked)
        loading.get()

    def _ask(self, number: int, version: int, checked: bool) -> Future:
        asked: Future = self.actor.call(
            ActorWorker.send_bucket, number, version, self.bucket_megabytes * MEGABYTE, self.dtype, checked
        )
        return asked
