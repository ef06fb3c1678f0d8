"""What goes between an engine and one of its workers, and how either learns that the other is gone.

The engine sends settings once and then plans; it closes the channel to end the worker. The worker sends numbers to
agree on, and what ended it. Everything is bytes of one message; nothing is pickled.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

_NUMBER, _FAILURE = b"N", b"F"
_SECONDS = struct.Struct("@ll")  # struct timeval


class WorkerFailedError(Exception):
    """What a worker said when it ended."""


class Channel:
    """One end of a channel. Every method may raise EOFError or OSError where the other end is gone."""

    def __init__(self, connection: Connection, *, send_seconds: float | None = None) -> None:
        """send_seconds: after so long of the other end taking nothing it counts as gone; None: wait."""
        self._connection = connection
        if send_seconds is not None:
            with socket.socket(fileno=_duplicate(connection)) as same:
                seconds = _SECONDS.pack(int(send_seconds), int(send_seconds % 1 * 1e6))
                same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, message: bytes) -> None:
        self._connection.send_bytes(message)

    def receive(self) -> bytes:
        """The next message; waits for it."""
        return self._connection.recv_bytes()

    def send_settings(self, settings: dict[str, Any]) -> None:
        self.send(json.dumps(settings).encode())

    def receive_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self.receive())
        return settings

    def send_number(self, number: int) -> None:
        self.send(_NUMBER + struct.pack("<q", number))

    def send_failure(self, text: str) -> None:
        self.send(_FAILURE + text.encode(errors="replace"))

    def receive_number(self, deadline: float) -> int:
        """deadline: of time.monotonic(). Raises TimeoutError behind it, WorkerFailedError where the other end ended."""
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("nothing was said in time")
        message = self.receive()
        if message[:1] == _FAILURE:
            raise WorkerFailedError(message[1:].decode())
        return int(struct.unpack("<q", message[1:])[0])

    def last_words(self) -> str | None:
        """What the other end said when it ended; None: nothing, so far."""
        try:
            while self._connection.poll():
                message = self.receive()
                if message[:1] == _FAILURE:
                    return message[1:].decode()
        except (EOFError, OSError):
            pass
        return None

    def close(self) -> None:
        self._connection.close()


def _duplicate(connection: Connection) -> int:
    with socket.socket(fileno=connection.fileno()) as one:
        other = one.dup()
        one.detach()
    return other.detach()
