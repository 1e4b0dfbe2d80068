"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource

from packhorse.errors import ConfigError

__all__ = ["FILES_PER_RANK", "allow_open_files", "files_needed"]

# A connection, the wake-ups of a dealer and of both ends of its monitor, the two ends of its bell; and one to spare.
FILES_PER_RANK = 7
FILES_OF_PROCESS = 64


def files_needed(ranks: int) -> int:
    """Open files of a process that simulates so many ranks."""
    return ranks * FILES_PER_RANK + FILES_OF_PROCESS


def allow_open_files(needed: int) -> None:
    """Raise this process's limit, which its children inherit, as far as it may be raised.

    Raises ``ConfigError`` with the number to set where ``needed`` is more than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"open files: a process of this load test needs {needed:,} and may open {hard:,}; set the limit to "
            f"{needed} or more (ulimit -Hn {needed} as root, or LimitNOFILE={needed}), or spread the ranks over more "
            "--processes"
        )
    if soft != resource.RLIM_INFINITY and (soft < hard or hard == resource.RLIM_INFINITY):
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(soft, needed) if hard == resource.RLIM_INFINITY else hard, hard)
        )
