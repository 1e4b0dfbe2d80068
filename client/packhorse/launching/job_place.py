"""Place of this process in a job that one node runs, and the endpoint that all its ranks derive alike."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from packhorse.declare.rank_info import rank_sources
from packhorse.errors import ConfigError

__all__ = ["JobPlace", "job_place"]

# What torchrun gives every rank of one start of a job, and no rank of another.
OF_ONE_START = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
ELSEWHERE = "start packhorse serve on one of the nodes, and pass its endpoint to packhorse.Feed"


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Place of this process: whether it starts the server, for how many ranks, and the name of the socket."""

    starts: bool
    ranks: int
    socket: str  # a file's name


def job_place(config: Path, environ: Mapping[str, str] = os.environ) -> JobPlace:
    """Return the place of this process in its job; the job reads the feed of ``config``.

    Raises ``ConfigError`` where ranks are on other nodes, or nothing tells them which start of a job they are of.
    """
    world_size = max((found.world_size for found in rank_sources(environ)), default=1)
    if world_size == 1:
        return JobPlace(starts=True, ranks=1, socket=f"{os.getpid()}-{secrets.token_hex(4)}.sock")
    local_rank, local_size = environ.get("LOCAL_RANK"), environ.get("LOCAL_WORLD_SIZE")
    if local_rank is None or local_size is None or OF_ONE_START[0] not in environ:
        raise ConfigError(
            f"launch() serves one process, or the ranks that torchrun starts on one node; this job has {world_size} "
            f"ranks, and LOCAL_RANK, LOCAL_WORLD_SIZE and {OF_ONE_START[0]} are not all set; {ELSEWHERE}"
        )
    if local_size != str(world_size):
        raise ConfigError(
            f"launch() serves the ranks of one node; this job has {world_size} ranks, of which {local_size} are on "
            f"this node (LOCAL_WORLD_SIZE); {ELSEWHERE}"
        )
    start = "\0".join([str(config), *(environ.get(name, "") for name in OF_ONE_START)])
    return JobPlace(local_rank == "0", world_size, f"job-{sha256(start.encode()).hexdigest()[:16]}.sock")
