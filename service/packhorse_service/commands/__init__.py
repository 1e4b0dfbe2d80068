"""The commands, as typer sees them: one module a command, which parses arguments and calls one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from packhorse import __version__
from packhorse_service.commands.check_command import check_command
from packhorse_service.commands.demo_command import demo_command
from packhorse_service.commands.exit_codes import reporting
from packhorse_service.commands.inspect_command import inspect_command
from packhorse_service.commands.keygen_command import keygen_command
from packhorse_service.commands.loadtest_command import loadtest_command
from packhorse_service.commands.plan_command import plan_command
from packhorse_service.commands.prepare_command import prepare_command
from packhorse_service.commands.serve_command import serve_command
from packhorse_service.commands.status_command import status_command
from packhorse_service.commands.tap_command import tap_command

__all__ = ["app"]

app = typer.Typer(
    help="Feed packed sequences to LLM trainers: pack on the fly, prove the contract, push micro-batches.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs are wrapped to the terminal, not where the source breaks them
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options of every command."""


COMMANDS: dict[str, Callable[..., int]] = {
    "serve": serve_command,
    "check": check_command,
    "plan": plan_command,
    "inspect": inspect_command,
    "keygen": keygen_command,
    "tap": tap_command,
    "status": status_command,
    "loadtest": loadtest_command,
    "prepare": prepare_command,
    "demo": demo_command,
}
for name, command in COMMANDS.items():
    app.command(name)(reporting(command))
