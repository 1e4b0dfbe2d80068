"""``packhorse keygen``: make the server's key and those of its clients, each in a file of its own.

    keys/server.key    for the server alone
    keys/clients.toml  for the server: who may connect, as which ranks; no secret
    keys/NAME.key      for the ranks of one client, with the server's public key in it

A file that is there is never overwritten: what was given to trainers would be worth nothing.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from packhorse.errors import ConfigError
from packhorse.transport.key_files import read_key_pair, require_curve
from packhorse_service.server.authentication import Ranks, load_clients

__all__ = ["CLIENTS_FILE", "SERVER_FILE", "WrittenFile", "make_client", "make_server"]

SERVER_FILE = "server.key"
CLIENTS_FILE = "clients.toml"
SERVER = Path(SERVER_FILE).stem
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

SERVER_TEXT = """\
# The server's key. Secret: for the server alone (curve.key_file).
public = "{public}"
secret = "{secret}"
"""
CLIENT_TEXT = """\
# Key of the client {name}. Secret: for its ranks alone (key_file of a Feed, or PACKHORSE_KEY_FILE).
public = "{public}"
secret = "{secret}"
server = "{server}"  # the server's public key
"""
CLIENTS_TEXT = """\
# Who may connect, and the ranks that each may claim: "all", or some of them as in "0, 8-15".
# No secrets (curve.clients). Read when the server starts; remove a section to lock its key out.
"""
CLIENT_SECTION = """
[{name}]
public = "{public}"
ranks = "{ranks}"
"""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """File that was written, and for whom it is."""

    path: Path
    purpose: str


def make_server(folder: Path) -> WrittenFile:
    """Make ``server.key``, and the folder where it is missing. Raises ``ConfigError``."""
    _require_folder(folder)
    public, secret = _pair()
    path = folder / SERVER_FILE
    _write_private(path, SERVER_TEXT.format(public=public, secret=secret))
    return WrittenFile(path, "secret, for the server alone")


def make_client(folder: Path, name: str, ranks: str) -> tuple[WrittenFile, WrittenFile]:
    """Make ``NAME.key`` and name it in ``clients.toml``. Raises ``ConfigError``."""
    may = Ranks.parse(ranks, "--ranks")
    clients = folder / CLIENTS_FILE
    if not NAME.fullmatch(name) or name == SERVER:
        raise ConfigError(f"--client={name!r} must be letters, digits, '-' and '_', and not {SERVER!r}")
    if not (folder / SERVER_FILE).exists():
        raise ConfigError(
            f"there is no {folder / SERVER_FILE}, whose public key a client needs; packhorse keygen {folder}"
        )
    _require_folder(folder)
    server, _ = read_key_pair(folder / SERVER_FILE)
    if clients.exists() and name in {client.name for client in load_clients(clients).by_key.values()}:
        raise ConfigError(
            f"{clients}: {name} is there already; choose another name, or remove its section and its file"
        )
    public, secret = _pair()
    path = folder / f"{name}.key"
    _write_private(path, CLIENT_TEXT.format(name=name, public=public, secret=secret, server=server.decode()))
    _append(clients, CLIENT_SECTION.format(name=name, public=public, ranks=may.text))
    return (
        WrittenFile(path, f"secret, for {may}"),
        WrittenFile(clients, "for the server: who may connect, no secrets"),
    )


def _pair() -> tuple[str, str]:
    require_curve()
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def _require_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be used: {error.strerror}; choose another") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"folder {str(folder)!r} has mode {mode:04o}: others could put keys of theirs there; chmod 700 {folder}"
        )


def _write_private(path: Path, text: str) -> None:
    """Write a new file that nobody else can read, at no moment."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} is there already, and is never overwritten; move it away, or choose another"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another folder") from error
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _append(clients: Path, section: str) -> None:
    try:
        with clients.open("a", encoding="utf-8") as file:
            file.write(section if file.tell() else CLIENTS_TEXT + section)
    except OSError as error:
        raise ConfigError(f"{clients} cannot be written: {error.strerror}; add to it by hand:{section}") from error
