"""``packhorse inspect``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from packhorse_service.commands.exit_codes import missing_extra
from packhorse_service.config.serve_config import load_config
from packhorse_service.preview.inspected_step import inspect_step, select, show_step, step_as_json
from packhorse_service.preview.plan_table import progress

__all__ = ["inspect_command"]

Config = Annotated[Path, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML")]
Step = Annotated[int, typer.Option(min=0, help="Which step; the first is 0.")]
Out = Annotated[Path | None, typer.Option(help="Write a picture of its rows (PNG).", metavar="OUT.PNG")]
Rank = Annotated[int | None, typer.Option(min=0, help="Only this data-parallel rank.")]


def inspect_command(
    config: Config,
    step: Step,
    out: Out = None,
    rank: Rank = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/plan.md has its keys.")] = False,
) -> int:
    """Show one step of a stream: which samples sit where, on which rank. Nothing is served."""
    with progress(Console(stderr=True), step + 1) as advance:
        found = inspect_step(load_config(config), config.parent, step, advance)
    selection = select(found, rank)
    if out is not None:
        try:
            from packhorse_service.preview.step_picture import draw_step
        except ModuleNotFoundError as error:
            missing_extra("inspect --out", error, "plot")
        draw_step(found, selection, out)
    if json_:
        typer.echo(step_as_json(found, rank))
        return 0
    show_step(found, selection, Console())
    if out is not None:
        typer.echo(f"{out} shows it")
    return 0
