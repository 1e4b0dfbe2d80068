"""``packhorse demo``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse_service.commands.exit_codes import missing_extra

__all__ = ["demo_command"]


def demo_command(
    out: Annotated[Path, typer.Option(help="Where the demo leaves what it makes.")] = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.", min=1)] = None,
) -> int:
    """Pack this Python's own source, docs and a chat set from them; train four ranks; draw the packs."""
    try:
        from packhorse_service.demo import run_demo
    except ModuleNotFoundError as error:
        missing_extra("demo", error, "demo")
    return run_demo(out, steps)
