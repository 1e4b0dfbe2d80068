"""``packhorse keygen``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse import ConfigError
from packhorse.transport.key_files import KEY_FILE
from packhorse_service.server.authentication import ALL
from packhorse_service.server.key_generation import CLIENTS_FILE, SERVER_FILE, make_client, make_server

__all__ = ["keygen_command"]

FIRST_CLIENT = "trainers"


def keygen_command(
    folder: Annotated[Path, typer.Argument(help="Where the key files are, or will be.", metavar="FOLDER")],
    client: Annotated[
        str | None, typer.Option(help="Add a key of this name to those that are there.", metavar="NAME")
    ] = None,
    ranks: Annotated[
        str, typer.Option(help="Which ranks the client's key may claim: all, 0-7, or '0, 8-15'.", metavar="RANKS")
    ] = ALL,
) -> int:
    """Make the keys with which a server may listen on a network.

    The first time it makes the server's key and one for its trainers; with --client a further one. Each secret is
    in a file that its owner alone can read, and no file is ever overwritten. The server reads FOLDER/server.key and
    FOLDER/clients.toml (curve, in its configuration), a trainer its own key file and nothing else.
    """
    if client is None and (folder / SERVER_FILE).exists():
        raise ConfigError(
            f"{folder / SERVER_FILE} is there already; --client NAME adds a key for trainers, another folder holds "
            "those of another server"
        )
    made = [make_server(folder)] if client is None else []
    name = client or FIRST_CLIENT
    made.extend(make_client(folder, name, ranks))
    width = max(len(str(file.path)) for file in made)
    for file in made:
        typer.echo(f"{file.path!s:<{width}}  {file.purpose}")
    if client is None:
        typer.echo(f"\nin feed.yaml  curve: {{key_file: {folder / SERVER_FILE}, clients: {folder / CLIENTS_FILE}}}")
    typer.echo(f"in its ranks  {KEY_FILE}={folder / f'{name}.key'}")
    return 0
