"""The folder of this user's own for the sockets of launched servers."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packhorse.errors import ConfigError

__all__ = ["remove_abandoned", "runtime_folder"]

LONGEST_PATH = 107  # bytes of a Unix socket's path on Linux


def runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, made where it is missing: below ``XDG_RUNTIME_DIR``, or else of temporary files.

    Raises ``ConfigError`` where another user could put a socket there.
    """
    given = environ.get("XDG_RUNTIME_DIR")
    base = Path(given) if given and Path(given).is_dir() else Path(tempfile.gettempdir())
    folder = base / f"packhorse-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder} must be a folder that only this user may use; remove it, or set XDG_RUNTIME_DIR")
    if len(os.fsencode(folder / ("x" * 32))) > LONGEST_PATH:
        raise ConfigError(f"{folder} is too long a path for a socket; set XDG_RUNTIME_DIR or TMPDIR to a shorter one")
    return folder


def remove_abandoned(folder: Path) -> None:
    """Remove the sockets of servers that were killed, and with their trainers: nobody else is left to do it."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # gone meanwhile, or busy: somebody's all the same
