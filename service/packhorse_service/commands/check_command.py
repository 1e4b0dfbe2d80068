"""``packhorse check``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from packhorse.errors import ConfigError
from packhorse_service.check.check_report import as_json, show
from packhorse_service.check.checks import check_access, check_streams, explain_rule
from packhorse_service.check.length_bound import load_lengths
from packhorse_service.config.serve_config import load_config
from packhorse_service.config.trainer_file import load_trainer

__all__ = ["check_command"]


def check_command(
    config: Annotated[
        Path | None, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML", show_default=False)
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option(help="What a trainer declares (YAML).", metavar="TRAINER.YAML")
    ] = None,
    world: Annotated[int | None, typer.Option(help="Ranks of the trainer's job.", min=1)] = None,
    lengths: Annotated[Path | None, typer.Option(help="Slots of each sample, to bound the fill (.npy).")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The lengths count ids: n ids fill n - 1 slots.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="It will be served with --insecure: without keys, on a network.")
    ] = False,
    rule: Annotated[str | None, typer.Option("--explain", help="Explain this rule, and check nothing.")] = None,
) -> int:
    """Prove the contract without a server: the rules of the handshake, and what follows from the layout.

    Exit code 0 where it holds, with or without warnings, 1 where it does not.
    """
    if rule is not None:
        typer.echo(explain_rule(rule))
        return 0
    if config is None:
        raise ConfigError("FEED.YAML is missing; name the configuration, or a rule with --explain")
    described = load_config(config)
    check_access(described, config.parent, insecure=insecure)
    report = check_streams(
        described,
        config.parent,
        None if trainer is None else load_trainer(trainer),
        world,
        None if lengths is None else load_lengths(lengths, ids=ids),
    )
    if json_:
        typer.echo(as_json(report))
    else:
        show(report, Console())
    return 0 if report.ok else 1
