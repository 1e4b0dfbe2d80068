"""The limit of open files: each connection of a reader is one for the server, and several for a simulated rank."""

from __future__ import annotations

import resource

from packhorse.errors import ConfigError

__all__ = ["allow_open_files"]

BESIDE_CONNECTIONS = 64  # the interpreter, loader processes, the listening socket, logs


def allow_open_files(connections: int, *, each: int = 1, ahead: int = 0, otherwise: str = "") -> int:
    """Raise the limit of this process and its children, where needed, for so many connections; returns the limit.

    A connection takes ``each`` files. There is room for ``ahead`` more where the hard limit has it. Raises
    ``ConfigError`` with the number to set where that limit, which only root may raise, is too low; ``otherwise``
    says what else helps.
    """
    needed = connections * each + BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"open files: {connections} connections need a limit of {needed}, and that of this process cannot be "
            f"raised above {hard}; set LimitNOFILE={needed} in its systemd unit, --ulimit nofile={needed} for a "
            f"container, or run `ulimit -n {needed}` as root before it starts{otherwise}"
        )
    wanted = needed + ahead
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
