"""Sends and receives all buckets of a version, over any transport from the actor to the generation processes.

In: buckets. Out: whether all have arrived. If a peer dies or times out, both sides report it and their own
state is intact; the controller finds out which process it was. Left out on purpose: the transports
(`weights_shared.py` on a node, `weights_broadcast.py` between nodes), and their choice
(`trainer/weight_links.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from hydraflow.engine.broadcast_group import GroupBroken
from hydraflow.weights.buckets import FlatBucket, Header
from hydraflow.weights.connection import ConnectionLost

log = logging.getLogger(__name__)
WAIT_SHARE = 0.5
"""Share of a call's timeout that a process waits for peers, so that healthy processes answer before the
controller looks for a hung one."""
BROKEN = (GroupBroken, ConnectionLost)
Outgoing = Iterable[tuple[Header | None, list[Tensor]]]
"""Buckets from `into_buckets`."""


class Outlet(Protocol):
    """A transport. Raises one of BROKEN when a receiver has died or timed out."""

    def send(self, header: Header, numbers: Sequence[Tensor]) -> None:
        """Starts sending a bucket, once there is memory for it."""

    def finish(self) -> None:
        """Waits until all buckets have been sent."""


@dataclass(frozen=True)
class Received:
    """All buckets have arrived."""

    difference: str | None
    """The first weight that differs, if the buckets were compared."""


def send_all(outgoing: Outgoing, outlet: Outlet | None) -> bool:
    """Returns False when some could not be sent, or there is no outlet. All buckets are produced even then,
    because gathering them is a collective."""
    whole = outlet is not None
    for header, numbers in outgoing:
        if outlet is not None:
            whole = whole and header is not None and _done(partial(outlet.send, header, numbers))
        numbers.clear()  # frees them while the next bucket is gathered
    return whole and outlet is not None and _done(outlet.finish)


def receive_all(buckets: Iterator[FlatBucket], take: Callable[[FlatBucket], str | None]) -> Received | None:
    """Calls `take` with each bucket. None: some have not arrived, because `buckets` raised one of BROKEN."""
    found: list[str] = []

    def take_all() -> None:
        for bucket in buckets:
            if (difference := take(bucket)) is not None:
                found.append(difference)
            del bucket  # its memory may be released before the next arrives

    return Received(found[0] if found else None) if _done(take_all) else None


def _done(work: Callable[[], None]) -> bool:
    try:
        work()
    except BROKEN as error:
        log.warning("weights did not arrive everywhere: %s", error)
        return False
    return True
