"""What every command does with its exit code and with an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape

from packhorse.errors import PackhorseError

__all__ = ["missing_extra", "reporting"]

P = ParamSpec("P")


def reporting(command: Callable[P, int]) -> Callable[P, None]:
    """Exit with the command's code; an error that is ours is shown as its message alone, exit code 1."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except PackhorseError as error:
            Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
            code = 1
        raise typer.Exit(code)

    return run


def missing_extra(what: str, error: ModuleNotFoundError, extra: str) -> NoReturn:
    """Leave, naming the module that is missing and the extra that brings it."""
    sys.exit(f"packhorse {what}: the module {error.name!r} is missing; pip install 'packhorse[{extra}]'")
