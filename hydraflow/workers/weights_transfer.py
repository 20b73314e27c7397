"""Sends all buckets of a version, and takes them, on whatever way there is from the actor to the generation
processes.

In: buckets, as they are made. Out: whether all have arrived. Where another process has died or is late, both
sides say so and their own state is unharmed; the controller finds out who it was. Left out on purpose: the
ways (`weights_line.py` on a node, `weights_group.py` between nodes), and which one a run takes
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
from hydraflow.weights.line import LineBroken

log = logging.getLogger(__name__)
WAIT_SHARE = 0.5
"""Share of a call's timeout that a process waits for others, so that those that answer do so before the
controller looks for the one that does not."""
BROKEN = (GroupBroken, LineBroken)
Outgoing = Iterable[tuple[Header | None, list[Tensor]]]
"""Buckets as `cut` makes them."""


class Outlet(Protocol):
    """Raises one of BROKEN when a receiver has died or is late."""

    def send(self, header: Header, numbers: Sequence[Tensor]) -> None:
        """Begins to send a bucket, once there is memory for it."""

    def finish(self) -> None:
        """Waits until all buckets have been sent."""


@dataclass(frozen=True)
class Received:
    """All buckets have arrived."""

    difference: str | None
    """The first weight that a bucket's comparison has named."""


def send_all(outgoing: Outgoing, outlet: Outlet | None) -> bool:
    """Returns False when some could not be sent, or there is no outlet. All are made in any case, because
    other ranks take part in that."""
    whole = True
    for header, numbers in outgoing:
        whole = whole and header is not None and _done(partial(_send, outlet, header, numbers))
        numbers.clear()  # while the next bucket is gathered
    return whole and outlet is not None and _done(outlet.finish)


def receive_all(buckets: Iterator[FlatBucket], take: Callable[[FlatBucket], str | None]) -> Received | None:
    """Calls `take` with each bucket. None: some have not arrived; `buckets` raises one of BROKEN then."""
    found: list[str] = []

    def take_all() -> None:
        for bucket in buckets:
            if (difference := take(bucket)) is not None:
                found.append(difference)
            del bucket  # its memory may be given back before the next comes

    return Received(found[0] if found else None) if _done(take_all) else None


def _send(outlet: Outlet | None, header: Header, numbers: Sequence[Tensor]) -> None:
    if outlet is not None:
        outlet.send(header, numbers)


def _done(work: Callable[[], None]) -> bool:
    try:
        work()
    except BROKEN as error:
        log.warning("weights did not arrive everywhere: %s", error)
        return False
    return True
