"""Where a server's monitor is: as configured, or beside the server's own endpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packhorse.errors import ConfigError

__all__ = ["AUTO", "BESIDE", "Address", "address_of"]

AUTO = "auto"
BESIDE = 4000  # ports: 9555 beside 5555
PORTS = 1 << 16
HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port to listen at; port 0 takes a free one."""

    host: str
    port: int
    moves: bool = False  # to a free port where this one is taken

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(monitor: str | None, listen: str) -> Address | None:
    """Return where a monitor listens: HOST:PORT as configured; ``auto``: on loopback, beside the port of ``listen``.

    Raises ``ConfigError`` where it is neither.
    """
    if monitor is None:
        return None
    if monitor != AUTO:
        found = HOST_PORT.fullmatch(monitor)
        if found is None or int(found[2]) >= PORTS:
            raise ConfigError(
                f"monitor={monitor!r} must be HOST:PORT (127.0.0.1:9555, or [::1]:9555), {AUTO!r}, or null for nowhere"
            )
        return Address(found[1].strip("[]"), int(found[2]))
    port = listen.rpartition(":")[2]
    beside = int(port) + BESIDE if listen.startswith("tcp://") and port.isdecimal() and int(port) else 0
    return Address("127.0.0.1", beside if beside < PORTS else 0, moves=True)
