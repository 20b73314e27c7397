"""Unix-socket connections between the sender of weights and the receivers on its node, to hand slots over.

In: messages of bytes. Out: the same at the peer, or `ConnectionLost`, which names a peer that died (which
closes its connections immediately) or timed out. The socket's name is abstract, not a file, so it
disappears with the listening process. Only processes of the same user are accepted. Left out on purpose: the
bytes of the weights (`slots.py`), and the protocol (`workers/weights_shared.py`).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

_LENGTH = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group id of a peer (SO_PEERCRED)."""
SENDER = "the actor's rank 0"
CONNECT_SECONDS = 60.0
"""Timeout for idle processes to connect."""


class ConnectionLost(Exception):
    """The peer has died or timed out."""


class Connection:
    """One end. other: name of the peer, for messages. seconds: timeout per message."""

    def __init__(self, end: socket.socket, other: str, seconds: float):
        end.settimeout(seconds)
        self._socket, self._arriving = end, end.makefile("rb")
        self.other, self._seconds = other, seconds

    def send(self, message: bytes) -> None:
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self) -> bytes:
        """Waits for a message. Raises ConnectionLost."""
        return self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0])

    def close(self) -> None:
        """The peer notices immediately."""
        self._arriving.close()
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        try:
            found = self._arriving.read(size)
        except OSError as error:
            raise self._broken(error) from error
        if len(found) < size:
            raise self._broken(ConnectionResetError())
        return found

    def _broken(self, error: OSError) -> ConnectionLost:
        late = isinstance(error, TimeoutError)
        how = f"has not answered within {self._seconds:g} seconds" if late else "has ended"
        return ConnectionLost(f"{self.other} {how}")


class Listener:
    """The sender's listening socket, until all receivers have connected."""

    def __init__(self) -> None:
        self.name = f"hydraflow-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)

    def accept(self, ranks: Sequence[int], seconds: float) -> list[Connection]:
        """A connection to each of these generation processes, with that timeout; then stops listening.
        ConnectionLost names those that did not connect in time."""
        connections, within = dict[int, Connection](), min(seconds, CONNECT_SECONDS)
        deadline = time.monotonic() + within
        with self._socket:
            while missing := [rank for rank in ranks if rank not in connections]:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    self._admit(self._socket.accept()[0], seconds, connections, deadline)
                except TimeoutError:
                    for connection in connections.values():
                        connection.close()
                    ranks_missing = ", ".join(map(str, missing))
                    raise ConnectionLost(
                        f"generation rank {ranks_missing} has not connected for the weights within {within:g}"
                        " seconds"
                    ) from None
        return [connections[rank] for rank in ranks]

    def close(self) -> None:
        """Stops listening; receivers that are still waiting notice immediately."""
        self._socket.close()

    def _admit(
        self, end: socket.socket, seconds: float, connections: dict[int, Connection], deadline: float
    ) -> None:
        """Accepts a connection; a replacement process connects again for the same rank."""
        if not _is_ours(end):
            end.close()
            return
        connection = Connection(end, "a generation process", seconds)
        end.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            rank = int(connection.receive())
        except ConnectionLost:
            connection.close()
            return  # it died, or did not identify itself
        end.settimeout(seconds)
        connection.other = f"generation rank {rank}"
        connections[rank] = connection


def connect(name: str, rank: int, seconds: float) -> Connection:
    """Connects a generation process to the sender that listens as `name`. ConnectionLost when none does."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(end, SENDER, seconds)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        raise ConnectionLost(f"{SENDER} no longer waits for generation processes: {error.strerror}") from None
    if not _is_ours(end):
        raise ConnectionLost(f"another user's process listens at the address of {SENDER}")
    connection.send(str(rank).encode())
    return connection


def _is_ours(end: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
