"""Lines between processes of a node: messages arrive, and a peer that is gone, late or a stranger is
named."""

from __future__ import annotations

import os
import threading
import time

import pytest

from hydraflow.weights.connection import Connection, ConnectionLost, Listener, connect

WAIT = 30.0


def connections(seconds: float = WAIT) -> tuple[Connection, Connection]:
    """Both ends of one: the sender's and that of generation rank 3."""
    listener = Listener()
    other = connect(listener.name, 3, seconds)
    [mine] = listener.accept([3], seconds)
    return mine, other


def test_messages_of_any_length_arrive_in_order() -> None:
    mine, other = connections()
    sent = [b"", b"one", bytes(range(256)) * 20_000]
    sending = threading.Thread(target=lambda: [mine.send(one) for one in sent])
    sending.start()
    assert [other.receive() for _ in sent] == sent
    sending.join()
    other.send(b"read")
    assert mine.receive() == b"read"


def test_an_end_that_is_gone_or_late_is_named() -> None:
    mine, other = connections(seconds=0.2)
    with pytest.raises(ConnectionLost, match=r"^generation rank 3 has not answered within 0\.2 seconds$"):
        mine.receive()
    mine, other = connections()
    mine.close()
    with pytest.raises(ConnectionLost, match="^the actor's rank 0 has ended$"):
        other.receive()
    mine, other = connections()
    other.close()
    since = time.monotonic()
    with pytest.raises(ConnectionLost, match="^generation rank 3 has ended$"):
        mine.receive()
    with pytest.raises(ConnectionLost, match="^generation rank 3 has ended$"):
        for _ in range(3):
            mine.send(b"more")
    assert time.monotonic() - since < WAIT / 2


def test_a_process_that_died_on_its_way_is_awaited_again() -> None:
    listener = Listener()
    connect(listener.name, 1, WAIT).close()
    again, zero = connect(listener.name, 1, WAIT), connect(listener.name, 0, WAIT)
    first, second = listener.accept([0, 1], WAIT)
    zero.send(b"0")
    again.send(b"1")
    assert (first.receive(), second.receive()) == (b"0", b"1")
    with pytest.raises(ConnectionLost, match="no longer waits for generation processes: Connection refused"):
        connect(listener.name, 1, WAIT)


def test_those_that_do_not_come_are_named() -> None:
    listener = Listener()
    other = connect(listener.name, 1, WAIT)
    with pytest.raises(
        ConnectionLost, match=r"^generation rank 0, 2 has not connected for the weights within 0\.2 sec"
    ):
        listener.accept([0, 1, 2], 0.2)
    with pytest.raises(ConnectionLost, match="^the actor's rank 0 has ended$"):
        other.receive()


def test_another_users_process_is_not_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, myself = Listener(), os.geteuid()
    connect(listener.name, 0, WAIT)
    monkeypatch.setattr(os, "geteuid", lambda: myself + 1)
    with pytest.raises(ConnectionLost, match="generation rank 0 has not connected"):
        listener.accept([0], 0.2)
    other = Listener()
    with pytest.raises(
        ConnectionLost, match="another user's process listens at the address of the actor's rank 0"
    ):
        connect(other.name, 0, WAIT)
