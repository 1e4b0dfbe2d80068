"""Faults inside the processes under test; Python runs this at their start where the folder is on PYTHONPATH.

``faulty://`` is the local file system, whose reads fail or stall as files in the folder ``FAULTS`` say. With
``CLOCK_JUMPS`` the wall clock is another at every look.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import time
from pathlib import Path
from typing import Any

import fsspec

FAULTS = Path(os.environ["FAULTS"])


class FaultyFile(io.FileIO):
    """``fail``: the next read raises, once. ``hold``: reads wait, and say so, until the file is gone."""

    def readinto(self, buffer: Any) -> int:
        try:
            (FAULTS / "fail").rename(FAULTS / "failed")
        except FileNotFoundError:
            pass
        else:
            raise OSError(errno.EIO, "the disk hiccups")
        while (FAULTS / "hold").exists():
            (FAULTS / f"held-{os.getpid()}").touch()
            time.sleep(0.01)
        read: int = super().readinto(buffer)
        return read


class FaultyFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "faulty"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": os.stat(path).st_size, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> FaultyFile:
        return FaultyFile(path, mode)


fsspec.register_implementation("faulty", FaultyFileSystem)

if "CLOCK_JUMPS" in os.environ:
    real, jumps = time.time, itertools.cycle([0.0, 86_400.0, -400_000_000.0, 3_600.0, -1.0])
    time.time = lambda: real() + next(jumps)  # what Python reads, logging for one; libzmq has a monotonic clock
    time.time_ns = lambda: int(time.time() * 1e9)
