"""Where a server may listen without keys: where only this machine, and only its own user, can connect."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path

from packhorse.errors import ConfigError

__all__ = ["is_private", "require_private", "require_private_folder"]

TRANSPORTS = ("tcp", "ipc")


def is_private(listen: str) -> bool:
    """Return whether nobody from another machine can connect, nor to ``ipc`` anybody who may not write its file.

    A name of a host or an interface may stand for any address, and an abstract ipc name is everybody's: neither is
    private. ``localhost`` is, by RFC 6761.
    """
    transport, _, address = listen.partition("://")
    if transport == "ipc":
        return not address.startswith("@")
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_private(listen: str, *, curve: bool, insecure: bool) -> None:
    """Raise ``ConfigError`` where a server without keys would be open to others, and that was not asked for."""
    transport, found, _ = listen.partition("://")
    if not found or transport not in TRANSPORTS:
        raise ConfigError(f"listen={listen!r} must be tcp://address:port or ipc://path")
    if not (curve or insecure or is_private(listen)):
        raise ConfigError(
            f"listen={listen!r} is not this machine's loopback, and without keys whoever reaches it can read the data "
            "and pose as a rank; make keys (packhorse keygen keys/) and name them under curve, or listen on "
            "tcp://127.0.0.1:PORT or ipc://PATH. --insecure serves all the same, where a network is trusted as a whole"
        )


def require_private_folder(listen: str) -> None:
    """Raise ``ConfigError`` where anybody could put another socket in the place of this one."""
    path = Path(listen.removeprefix("ipc://"))
    if not listen.startswith("ipc://") or listen.startswith(("ipc://@", "ipc://*")):
        return
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise ConfigError(f"listen={listen!r}: its folder cannot be used: {error.strerror}; make it") from error
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"listen={listen!r}: everybody may write to its folder, and put a socket in the place of this one; "
            f"choose a folder of your own, or chmod 700 {path.parent}"
        )
