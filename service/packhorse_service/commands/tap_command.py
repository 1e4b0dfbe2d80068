"""``packhorse tap``, as typer sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from packhorse import ConfigError, Feed
from packhorse.wire.messages import DEFAULT_WINDOW
from packhorse_service.config.layout_text import layout_of
from packhorse_service.config.trainer_file import TrainerFile, load_trainer
from packhorse_service.tap import TapSettings, load_state, tap

__all__ = ["tap_command"]


def tap_command(
    endpoint: Annotated[
        str, typer.Argument(help="Of a running server: tcp://host:port or ipc://path.", metavar="ENDPOINT")
    ],
    rank: Annotated[int | None, typer.Option(help="Which rank to be; left out: as torchrun or Slurm say.")] = None,
    layout: Annotated[str, typer.Option(help="Sizes of the job, for example data=2,context=2.")] = "",
    trainer: Annotated[
        Path | None, typer.Option(help="Declare what this file says (YAML), its layout too.", metavar="TRAINER.YAML")
    ] = None,
    stream: Annotated[str, typer.Option(help="Which stream of the server.")] = "train",
    steps: Annotated[int | None, typer.Option(help="Leave after so many steps.", min=1)] = None,
    delay: Annotated[float, typer.Option(help="Seconds to wait behind each micro-batch.", min=0)] = 0.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the readers to meet, and for data.")] = 540.0,
    state_out: Annotated[Path | None, typer.Option(help="Keep the state here, after each step and at the end.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from this state.", metavar="STATE")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Print whose samples they are (the server needs keys).")] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Print each (input id, target id).")] = False,
    key_file: Annotated[
        Path | None, typer.Option(help="The key of this client; left out: what PACKHORSE_KEY_FILE names.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Check whole rows against their digest.")] = True,
) -> int:
    """Connect as a rank and print one JSON line for each micro-batch.

    The server counts it as that reader: the stream begins when every rank of the layout has come, and waits for
    this one. It leaves in order at the end and after --steps, as a trainer does; a signal ends it at once.
    """
    declared = TrainerFile() if trainer is None else load_trainer(trainer)
    if layout and declared.layout is not None:
        raise ConfigError(f"--layout={layout!r}: {trainer} has a layout too; give it in one place")
    state = None if resume is None else load_state(resume)
    feed = Feed(
        endpoint,
        contract=replace(declared.contract, trainer=declared.trainer),
        layout=declared.layout or layout_of(layout),
        rank=rank,
        stream=stream,
        window=declared.window or DEFAULT_WINDOW,
        start_timeout=timeout,
        stall_timeout=timeout,
        arrays="numpy",
        key_file=key_file,
    )
    settings = TapSettings(steps=steps, delay_s=delay, state_out=state_out, keys=keys, pairs=pairs, verify=verify)
    with feed:
        if state is not None:
            feed.load_state_dict(state)
        tap(feed, settings, typer.echo)
    return 0
