"""``packhorse status``, as typer sees it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from packhorse.errors import ConfigError
from packhorse_service.monitoring.show import show, show_json, watch

__all__ = ["status_command"]

SHORTEST_S = 0.1


def status_command(
    endpoint: Annotated[
        str,
        typer.Argument(help="http://HOST:PORT of the monitor, or tcp://HOST:PORT of the readers.", metavar="ENDPOINT"),
    ],
    watching: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print what the server says, as JSON.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=SHORTEST_S)] = 2.0,
) -> int:
    """Show how a running server does: whether it feeds, what it waits for, and for whom.

    Exit code 0 where every stream is served well, 4 where one is stalled or has failed, 1 where the server cannot be
    asked. The monitor is 4000 ports above that of the readers, where the configuration says nothing else.
    """
    if watching and json_:
        raise ConfigError("--watch with --json: choose one; a program asks as often as it likes")
    if json_:
        return show_json(endpoint, typer.echo)
    console = Console()
    return watch(endpoint, console, interval) if watching else show(endpoint, console)
