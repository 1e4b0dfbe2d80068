"""``python -m packhorse_service.loadtest.run.worker``: a share of the ranks, commanded over stdin, reporting on stdout.

Lines of JSON (``messages``): the first command is the job. It ends with its result, or when its stdin ends.
"""

from __future__ import annotations

import os
import signal
import sys

from packhorse_service.loadtest.run.swarm import Swarm
from packhorse_service.loadtest.run.worker_messages import COMMANDS, REPORTS, Job, Report

__all__ = ["main"]


def main() -> int:
    """Be these ranks until told to leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator says when to leave
    commands = sys.stdin.fileno()
    job = COMMANDS.validate_json(_first_line(commands))
    if not isinstance(job, Job):
        raise TypeError(f"the first command must be a job, not {job.kind!r}")
    Swarm(job, commands, _tell).run()
    return 0


def _first_line(source: int) -> bytes:
    """Byte by byte: what is behind it is the swarm's to read."""
    line = bytearray()
    while (byte := os.read(source, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _tell(report: Report) -> None:
    sys.stdout.buffer.write(REPORTS.dump_json(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
