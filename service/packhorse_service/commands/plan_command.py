"""``packhorse plan``, as typer sees it: what a stream will be like, before GPU hours are spent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from packhorse.errors import ConfigError
from packhorse_service.check.length_bound import load_lengths
from packhorse_service.commands.exit_codes import missing_extra
from packhorse_service.config.serve_config import load_config
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.packing.packing_plan import PackingAlgorithm
from packhorse_service.preview.compare import compared
from packhorse_service.preview.from_config import plan_feed
from packhorse_service.preview.from_lengths import LengthsOptions, plan_lengths
from packhorse_service.preview.plan_report import PlanReport, as_json
from packhorse_service.preview.plan_table import progress, show

__all__ = ["plan_command"]


def _of_lengths(text: str, *names: str, **settings: Any) -> Any:
    """Return an option that says what a configuration would."""
    return typer.Option(
        *names, help=text, rich_help_panel="With --lengths, instead of FEED.YAML", show_default=False, **settings
    )


# Left out, an option is None: so one that does not belong to a configuration is seen.
MaybeConfig = Annotated[
    Path | None, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML", show_default=False)
]
Lengths = Annotated[
    Path | None,
    _of_lengths("Slots of each sample, one row of integers (.npy): as check takes them.", metavar="FILE.NPY"),
]
Ids = Annotated[
    bool, _of_lengths("The lengths count ids: n ids fill n - 1 slots, as the last is only a target.", "--ids")
]
SeqLength = Annotated[int | None, _of_lengths("Slots of a pack. Required.", min=1)]
DataParallel = Annotated[int | None, _of_lengths("Data-parallel ranks. Required.", min=1)]
GlobalBatchSize = Annotated[int | None, _of_lengths("Packs of a step, over all ranks. Required.", min=1)]
SegmentMultiple = Annotated[int | None, _of_lengths("Segments are padded to a multiple of this. Else 1.", min=1)]
Algorithm = Annotated[
    PackingAlgorithm | None,
    _of_lengths(f"How packs are made: {', '.join(PackingAlgorithm)}. Else the first.", metavar="NAME"),
]
Lookahead = Annotated[
    int | None, _of_lengths("Packs' worth of samples to choose from. Else 64, or a step's packs if fewer.", min=1)
]
Window = Annotated[int | None, _of_lengths("Steps that are balanced together. Else 1.", min=1)]
HiddenSize = Annotated[int | None, _of_lengths("Of the model: weighs length against length². Else 4096.", min=1)]
MaxSegments = Annotated[int | None, _of_lengths("Samples of a pack at most. Else no limit.", min=1)]
OverLengthPolicy = Annotated[
    OverLength | None,
    _of_lengths(f"For samples of more slots than a pack: {', '.join(OverLength)}. Else error.", metavar="POLICY"),
]
Epochs = Annotated[int | None, _of_lengths("Times to read the lengths, in their order. Else 1.", min=1)]
Steps = Annotated[int | None, typer.Option(min=1, help="Stop after so many steps; needed where a source is endless.")]
Plot = Annotated[
    Path | None, typer.Option(help="Write a picture of lengths, fill and balance (PNG).", metavar="OUT.PNG")
]


def plan_command(
    config: MaybeConfig = None,
    lengths: Lengths = None,
    ids: Ids = False,
    seq_length: SeqLength = None,
    data_parallel: DataParallel = None,
    global_batch_size: GlobalBatchSize = None,
    segment_multiple: SegmentMultiple = None,
    algorithm: Algorithm = None,
    lookahead: Lookahead = None,
    window: Window = None,
    hidden_size: HiddenSize = None,
    max_segments: MaxSegments = None,
    over_length: OverLengthPolicy = None,
    epochs: Epochs = None,
    steps: Steps = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/plan.md has its keys.")] = False,
    plot: Plot = None,
) -> int:
    """Tell what a stream will be like: fill, waits, balance, mixture, and what over-length costs.

    It reads the data of FEED.YAML through the whole path, builds no row and serves nothing.
    Or it needs but the lengths of samples. It compares pack lengths and recommends one.
    """
    options = {
        "seq_length": seq_length,
        "data_parallel": data_parallel,
        "global_batch_size": global_batch_size,
        "segment_multiple": segment_multiple,
        "algorithm": algorithm,
        "lookahead": lookahead,
        "window": window,
        "hidden_size": hidden_size,
        "max_segments": max_segments,
        "over_length": over_length,
        "epochs": epochs,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with progress(Console(stderr=True), steps) as advance:
        if lengths is not None:
            _refuse_both(config)
            collector = plan_lengths(load_lengths(lengths, ids=ids), _lengths_options(lengths, steps, given), advance)
        else:
            found = _only_a_feed(config, [*given, *(["ids"] if ids else [])])
            collector = plan_feed(load_config(found), found.parent, str(found), steps, advance)
        report = compared(collector)
    return _tell(report, json_=json_, picture=plot)


def _refuse_both(config: Path | None) -> None:
    if config is not None:
        raise ConfigError(f"both {str(config)!r} and --lengths are given; plan one of them")


def _only_a_feed(config: Path | None, given: list[str]) -> Path:
    if config is None:
        raise ConfigError("nothing to plan; name a configuration (FEED.YAML), or give --lengths FILE.npy")
    if given:
        raise ConfigError(
            f"{', '.join(map(_option, given))}: only with --lengths; {str(config)!r} says it itself: change it there"
        )
    return config


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _lengths_options(lengths: Path, steps: int | None, given: dict[str, Any]) -> LengthsOptions:
    missing = [name for name in ("seq_length", "data_parallel", "global_batch_size") if name not in given]
    if missing:
        raise ConfigError(f"{', '.join(map(_option, missing))}: required with --lengths")
    return LengthsOptions(origin=lengths.name, steps=steps, **given)


def _tell(report: PlanReport, *, json_: bool, picture: Path | None) -> int:
    if picture is not None:
        try:
            from packhorse_service.preview.plan_picture import plot
        except ModuleNotFoundError as error:
            missing_extra("plan --plot", error, "plot")
        plot(report, picture)
    if json_:
        typer.echo(as_json(report))
    else:
        show(report, Console())
    return 0
