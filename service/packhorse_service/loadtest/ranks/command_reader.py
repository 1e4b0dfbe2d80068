"""Commands of the coordinator, read from a pipe as they arrive."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from packhorse_service.loadtest.ranks.worker_messages import COMMANDS, Command

__all__ = ["CommandReader"]

CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class CommandReader:
    """Reader of one file descriptor that holds a command a line; ``closed`` once the other end is."""

    fileno: int
    closed: bool = False
    _unread: bytearray = field(default_factory=bytearray)  # the begin of a line

    def first(self) -> Command:
        """Wait for the first command and return it; what is behind it stays in the pipe."""
        line = bytearray()
        while (byte := os.read(self.fileno, 1)) not in (b"", b"\n"):
            line += byte
        return COMMANDS.validate_json(bytes(line))

    def read(self) -> list[Command]:
        """Return the commands that have arrived; waits where nothing has."""
        data = os.read(self.fileno, CHUNK_BYTES)
        self.closed = self.closed or not data
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        return [COMMANDS.validate_json(bytes(line)) for line in lines]
