"""The limit of open files: each connection of a reader is one.

Where it is reached, ZeroMQ tries in vain to accept the next connection, at full speed and for ever. So it is
raised at start, with room for connections that are accepted before the server closes them again.
"""

from __future__ import annotations

import resource

from packhorse.errors import ConfigError

__all__ = ["allow_open_files"]

BESIDE_CONNECTIONS = 64  # the interpreter, loader processes, the listening socket, logs
ACCEPTED_AHEAD = 4096  # connections that come at once and are too many


def allow_open_files(connections: int) -> int:
    """Raise the limit of this process, where needed, for so many connections; returns the limit.

    Raises ``ConfigError`` with the number to set where the hard limit, which only root may raise, is too low.
    """
    needed = connections + BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"open files: {connections} connections need a limit of {needed}, and that of this process cannot be "
            f"raised above {hard}; set LimitNOFILE={needed} in its systemd unit, --ulimit nofile={needed} for a "
            f"container, or run `ulimit -n {needed}` as root before it starts"
        )
    wanted = needed + ACCEPTED_AHEAD
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
