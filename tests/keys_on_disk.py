"""Keys as ``packhorse keygen`` makes them, for tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packhorse_service.server.authentication import ALL
from packhorse_service.server.key_generation import CLIENTS_FILE, SERVER_FILE, make_client, make_server

__all__ = ["CURVE", "make_keys", "secrets_in"]

CURVE = {"key_file": f"keys/{SERVER_FILE}", "clients": f"keys/{CLIENTS_FILE}"}  # of a configuration beside ``keys``


def make_keys(folder: Path, **clients: str) -> Path:
    """A folder with the keys of a server and of clients, by name the ranks that each may claim."""
    make_server(folder)
    for name, ranks in (clients or {"trainers": ALL}).items():
        make_client(folder, name, ranks)
    return folder


def secrets_in(folder: Path) -> list[str]:
    """Every secret of a folder."""
    return [tomllib.loads(path.read_text())["secret"] for path in sorted(folder.glob("*.key"))]
