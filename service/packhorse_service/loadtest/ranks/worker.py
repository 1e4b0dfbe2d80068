"""``python -m packhorse_service.loadtest.ranks.worker``: some of the ranks, commanded over stdin, reporting on stdout.

Lines of JSON (``worker_messages``): the first command is the job. It ends with its result, or when its stdin ends.
"""

from __future__ import annotations

import signal
import sys

from packhorse_service.loadtest.ranks.command_reader import CommandReader
from packhorse_service.loadtest.ranks.swarm import Swarm
from packhorse_service.loadtest.ranks.worker_messages import REPORTS, Job, Report

__all__ = ["main"]


def main() -> int:
    """Simulate the ranks of the job until told to leave, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator says when to leave
    commands = CommandReader(sys.stdin.fileno())
    job = commands.first()
    if not isinstance(job, Job):
        raise TypeError(f"the first command must be a job, not {job.kind!r}")
    Swarm(job, commands, _send).run()
    return 0


def _send(report: Report) -> None:
    sys.stdout.buffer.write(REPORTS.dump_json(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
