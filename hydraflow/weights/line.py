"""The connection over which a sender of weights and the receivers of its node hand slots over.

In: messages of bytes. Out: the same at the other end, or `LineBroken`, which names that end: it has died,
which ends its lines at once, or it has not answered in time. A line is a Unix socket. Its name is no file: it
is gone with the process that listens. Only processes of the same user are let in. Left out on purpose: the
bytes of the weights (`slots.py`), and who may do what with a slot when (`workers/weights_line.py`).
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
"""Process, user and group, as Linux tells them."""
SENDER = "the actor's rank 0"
COMING_SECONDS = 60.0
"""How long idle processes may take to connect."""


class LineBroken(Exception):
    """The other end has died, or was not there in time."""


class Line:
    """One end. other: who is at the other one, for messages. seconds: how long each message may take."""

    def __init__(self, end: socket.socket, other: str, seconds: float):
        end.settimeout(seconds)
        self._socket, self._arriving = end, end.makefile("rb")
        self.other, self._seconds = other, seconds

    def send(self, message: bytes) -> None:
        """LineBroken: see the class."""
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self) -> bytes:
        """Waits for a message. LineBroken: see the class."""
        return self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0])

    def close(self) -> None:
        """The other end notices at once."""
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

    def _broken(self, error: OSError) -> LineBroken:
        late = isinstance(error, TimeoutError)
        how = f"has not answered in {self._seconds:g} seconds" if late else "has ended"
        return LineBroken(f"{self.other} {how}")


class Listener:
    """Where receivers find the sender, until all of them have come."""

    def __init__(self) -> None:
        self.name = f"hydraflow-weights-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(1024)

    def accept(self, ranks: Sequence[int], seconds: float) -> list[Line]:
        """A line to each of these generation processes, with that limit; it then listens no more. LineBroken
        names those that have not come in time."""
        lines, within = dict[int, Line](), min(seconds, COMING_SECONDS)
        deadline = time.monotonic() + within
        with self._socket:
            while missing := [rank for rank in ranks if rank not in lines]:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    self._let_in(self._socket.accept()[0], seconds, lines, deadline)
                except TimeoutError:
                    for line in lines.values():
                        line.close()
                    who = f"generation rank {', '.join(map(str, missing))}"
                    raise LineBroken(f"{who} has not come for the weights in {within:g} seconds") from None
        return [lines[rank] for rank in ranks]

    def close(self) -> None:
        """Whoever is still waiting notices at once."""
        self._socket.close()

    def _let_in(self, end: socket.socket, seconds: float, lines: dict[int, Line], deadline: float) -> None:
        """A process that took the place of another comes for it again."""
        if not _is_ours(end):
            end.close()
            return
        line = Line(end, "a generation process", seconds)
        end.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            rank = int(line.receive())
        except LineBroken:
            line.close()
            return  # it died, or does not say who it is
        end.settimeout(seconds)
        line.other = f"generation rank {rank}"
        lines[rank] = line


def connect(name: str, rank: int, seconds: float) -> Line:
    """The line from a generation process to the sender that listens there. LineBroken: none does any more."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line = Line(end, SENDER, seconds)
    try:
        end.connect(f"\0{name}")
    except OSError as error:
        raise LineBroken(f"{SENDER} waits for no generation process any more: {error.strerror}") from None
    if not _is_ours(end):
        raise LineBroken(f"another user's process listens in the place of {SENDER}")
    line.send(str(rank).encode())
    return line


def _is_ours(end: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
