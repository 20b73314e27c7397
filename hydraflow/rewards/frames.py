"""Messages between a pool and its processes: JSON over a socket, each prefixed by its length in eight bytes.

In: values that JSON can hold. Out: the same on the other end. The pool never waits for the rest of a partial
message: it reads the available bytes and keeps them until the message is complete.
Left out on purpose: `multiprocessing.connection`, whose reads wait for the end of a message without a limit.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">Q")


class FrameSocket:
    """One end of the socket, whose own timeout limits how long a message may take to send. `most`: bytes of
    the longest message that can be received, None for no limit."""

    def __init__(self, end: socket.socket, *, most: int | None = None):
        self.socket, self._most = end, most
        self._held = bytearray()

    def fileno(self) -> int:
        """File descriptor, for `select`."""
        return self.socket.fileno()

    def send(self, message: Any) -> None:
        """OSError when the other end is gone, TimeoutError among them when it does not read."""
        body = json.dumps(message).encode()
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def arrived(self) -> list[Any]:
        """The messages that are complete after one read. EOFError when the other end is closed, OSError when
        it is gone, ValueError when the bytes are no message."""
        received = self.socket.recv(2**20)
        if not received:
            raise EOFError
        self._held += received
        messages = []
        while (body := self._body()) is not None:
            messages.append(json.loads(body))
        return messages

    def receive(self) -> Any:
        """Waits for one message. For the child's end, which has nothing else to do; the pool sends the next
        message only after the answer, so there is never more than one."""
        messages: list[Any] = []
        while not messages:
            messages = self.arrived()
        (message,) = messages
        return message

    def close(self) -> None:
        self.socket.close()

    def _body(self) -> bytes | None:
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if self._most is not None and length > self._most:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        body = bytes(self._held[_LENGTH.size : end])
        del self._held[:end]
        return body
