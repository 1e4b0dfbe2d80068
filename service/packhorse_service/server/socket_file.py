"""The file of an ``ipc://`` socket, which ZeroMQ makes and leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["SocketFile"]

IPC = "ipc://"


@dataclass(frozen=True, slots=True)
class SocketFile:
    """One file, known by its inode: a server that was started since may have another under the same name."""

    path: Path
    inode: int

    @classmethod
    def of(cls, endpoint: str) -> SocketFile | None:
        """Of an endpoint that was bound just now; none where it is no file: TCP, or an abstract name."""
        path = Path(endpoint.removeprefix(IPC))
        is_file = endpoint.startswith(IPC) and path.is_socket()
        return cls(path, path.stat().st_ino) if is_file else None

    def keep_private(self) -> None:
        """Only its owner may connect, whatever the umask; ZeroMQ leaves that to it."""
        self.path.chmod(0o600)

    def remove(self) -> None:
        """Nobody listens there any more."""
        if self.path.is_socket() and self.path.stat().st_ino == self.inode:
            self.path.unlink(missing_ok=True)
