"""The file of an ``ipc://`` socket, which ZeroMQ makes and leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["SocketFile"]

IPC = "ipc://"


@dataclass(frozen=True, slots=True)
class SocketFile:
    """File of a socket, known by its inode: a server that was started since may have another under the same name."""

    path: Path
    inode: int

    @classmethod
    def at(cls, endpoint: str) -> SocketFile | None:
        """Return the file of an endpoint that was bound just now; ``None`` for TCP and for an abstract name."""
        path = Path(endpoint.removeprefix(IPC))
        is_file = endpoint.startswith(IPC) and path.is_socket()
        return cls(path, path.stat().st_ino) if is_file else None

    def keep_private(self) -> None:
        """Let nobody but its owner connect, whatever the umask, to which ZeroMQ leaves that."""
        self.path.chmod(0o600)

    def remove(self) -> None:
        """Remove the file, where it still is this one."""
        if self.path.is_socket() and self.path.stat().st_ino == self.inode:
            self.path.unlink(missing_ok=True)
