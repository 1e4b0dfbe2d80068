"""What systemd is told (``sd_notify``): that the server listens, that its loop turns, that it leaves.

The protocol is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names; see sd_notify(3).
Elsewhere nothing is said.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

__all__ = ["SystemdNotifier"]

log = logging.getLogger("packhorse.server")


class SystemdNotifier:
    """Way to systemd, where ``NOTIFY_SOCKET`` in the environment names one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")

    def ready(self, status: str) -> None:
        """Tell systemd that the server listens."""
        self._say(f"READY=1\nSTATUS={status}")

    def watchdog(self, status: str) -> None:
        """Feed systemd's watchdog, and tell it what the server does."""
        self._say(f"WATCHDOG=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Tell systemd that the server leaves."""
        self._say("STOPPING=1")

    def _say(self, text: str) -> None:
        """Send a datagram; log where systemd cannot be reached, which will act on silence by itself."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
                datagrams.sendto(text.encode(), socket.MSG_DONTWAIT, address)
        except OSError as error:
            log.warning("systemd could not be told: %s", error)
