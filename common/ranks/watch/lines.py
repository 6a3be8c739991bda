"""A connection that carries JSON objects, one a line, between a rank and the hub of the watch."""

import json
import os
import socket
import threading
from typing import Any

CHUNK_BYTES = 1 << 16
SEND_SECONDS = 5.0  # for what does not fit into the kernel's buffers


class LineSocket:
    """One end of a connection; any thread may send, one reads."""

    def __init__(self, connection: socket.socket, dead_seconds: float, *, may_wait: bool = True) -> None:
        connection.settimeout(SEND_SECONDS if may_wait else 0.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a machine that is gone does not end its connections
            milliseconds = max(int(1000 * dead_seconds), 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self.connection = connection
        self.is_broken = False  # nothing more can be sent
        self._lock, self._received = threading.Lock(), b""
        # A child that is forked holds the connection too: it would go on when this process has died.
        os.register_at_fork(after_in_child=self._close_in_child)

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Send an object. One that cannot be sent is dropped, and those after it: the reader stands still."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            if self.is_broken:
                return
            try:
                self.connection.sendall(data)
            except OSError:
                self.is_broken = True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the objects that have come, None at the end of the connection."""
        try:
            data = self.connection.recv(CHUNK_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_sending(self) -> None:
        """Let the other end know that nothing more comes."""
        with self._lock:
            self.is_broken = True
            try:
                self.connection.shutdown(socket.SHUT_WR)
            except OSError:
                return

    def close(self) -> None:
        """Close the connection."""
        self.is_broken = True
        self.connection.close()

    def _close_in_child(self) -> None:
        self.is_broken = True
        if self.connection.fileno() >= 0:
            os.close(self.connection.detach())
