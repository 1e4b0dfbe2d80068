"""Which samples of one step sit where: ``packhorse inspect``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from packhorse.errors import ConfigError
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.packing.modes import PackedMicroBatch, Segment
from packhorse_service.pipeline.plan import StreamPlan, make_engine, plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.planning.planned_step import PlannedStep
from packhorse_service.planning.row_layout import row_offsets
from packhorse_service.preview.from_lengths import Advance
from packhorse_service.preview.unit_names import short_name
from packhorse_service.text.formatting import names

__all__ = [
    "InspectedStep",
    "PlacedMicroBatch",
    "PlacedSample",
    "Selection",
    "inspect_step",
    "select",
    "show_step",
    "step_as_json",
]

NAMED = 3  # sources named in a line of the table
LINES = 48  # rows shown at once; more cannot be told apart


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample, or a run of its ids, in a row. ``physical`` slots with the padding behind it."""

    source: str
    shard: str
    key: str
    begin: int  # ids of the sample that are read: begin … end - 1
    end: int
    ids: int  # of the whole sample
    row: int  # of the micro-batch; 0 where it has one row
    start: int  # first slot in the row
    slots: int
    physical: int


@dataclass(frozen=True, slots=True)
class PlacedMicroBatch:
    """Micro-batch of one rank, with its samples. A filler repeats the last one, with nothing to train on."""

    rank: int
    index: int
    number: int  # of the step's micro-batches, in the order of the pack stream
    filler: bool
    rows: int
    width: int  # slots of a row
    samples: tuple[PlacedSample, ...]

    @property
    def tokens(self) -> int:
        return sum(sample.slots for sample in self.samples)


@dataclass(frozen=True, slots=True)
class InspectedStep:
    """A whole step, rank by rank."""

    step: int
    packing: str
    data_parallel: int
    sources: tuple[str, ...]  # of the stream
    micro_batches: tuple[PlacedMicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a step that is shown, and what to say of the rest."""

    micro_batches: Sequence[PlacedMicroBatch]
    left_out: str  # empty where nothing is


def inspect_step(config: ServeConfig, base: Path, step: int, advance: Advance) -> InspectedStep:
    """Plan a stream up to ``step``. Raises ``ConfigError`` where it ends before, and what serving it would raise."""
    plan = plan_stream(config, base)
    engine = make_engine(config, plan)
    try:
        return _placed(_planned(Pipeline(plan, engine), step, advance), plan)
    finally:
        engine.close()


def _planned(pipeline: Pipeline, step: int, advance: Advance) -> PlannedStep[PackedMicroBatch]:
    while (planned := pipeline.next_planned_step()) is not None:
        advance(pipeline.step, sum(counts.samples for counts in pipeline.counts.values()))
        if planned.step == step:
            return planned
    if pipeline.step == 0:
        raise ConfigError(f"--step {step}: the stream has no step at all; packhorse plan says why")
    raise ConfigError(f"--step {step}: the last step of the stream is {pipeline.step - 1}, counted from 0")


def _placed(planned: PlannedStep[PackedMicroBatch], plan: StreamPlan) -> InspectedStep:
    last = len(planned.micro_batches) - 1
    placed = tuple(
        _micro_batch(planned.micro_batches[min(number, last)], plan, rank, index, number, filler=number > last)
        for rank, of_rank in enumerate(planned.ranks)
        for index, number in enumerate(of_rank)
    )
    sources = tuple(setting.order.name for setting in plan.sources)
    return InspectedStep(planned.step, str(plan.contract.packing), plan.layout.data, sources, placed)


def _micro_batch(
    packed: PackedMicroBatch, plan: StreamPlan, rank: int, index: int, number: int, *, filler: bool
) -> PlacedMicroBatch:
    contract = plan.contract
    (_, physical), *_ = row_offsets([packed.slots], contract)
    offsets = physical.tolist()
    rows = 1 if contract.packed else contract.micro_batch_size
    width = offsets[-1] // rows
    samples = tuple(
        sample
        for segment, start, end in zip(packed.segments, offsets, offsets[1:], strict=False)
        for sample in _samples(segment, plan, start // width, start % width, end - start)
    )
    return PlacedMicroBatch(rank, index, number, filler, rows, width, samples)


def _samples(segment: Segment, plan: StreamPlan, row: int, start: int, physical: int) -> Iterator[PlacedSample]:
    """Return the pieces of a segment, one after the other; the padding is behind the last."""
    filled = [piece for piece in segment if piece.slots]
    rest = physical - sum(piece.slots for piece in filled)
    for place, piece in enumerate(filled, start=1):
        setting, first = plan.sources[piece.source], int(piece.block.offsets[piece.sample])
        yield PlacedSample(
            source=setting.order.name,
            shard=setting.shards[piece.shard].name,
            key=piece.block.keys[piece.sample],
            begin=piece.begin - first,
            end=piece.end - first,
            ids=int(piece.block.offsets[piece.sample + 1]) - first,
            row=row,
            start=start,
            slots=piece.slots,
            physical=piece.slots + (rest if place == len(filled) else 0),
        )
        start += piece.slots


# Showing -------------------------------------------------------------------------------------------------


def select(step: InspectedStep, rank: int | None) -> Selection:
    """Select one rank, or as many whole ranks as can be told apart.

    Raises ``ConfigError`` for a rank that is not there.
    """
    if rank is not None and rank >= step.data_parallel:
        raise ConfigError(f"--rank {rank}: the last data-parallel rank of this layout is {step.data_parallel - 1}")
    wanted = [each for each in step.micro_batches if rank in (None, each.rank)]
    lines = LINES // wanted[0].rows
    if len(wanted) <= lines:
        return Selection(wanted, "")
    each = len(step.micro_batches) // step.data_parallel
    if rank is None and each <= lines:
        ranks = lines // each
        others = f"rank{'s' if ranks > 1 else ''} 0{f' to {ranks - 1}' if ranks > 1 else ''} of {step.data_parallel}"
        return Selection(wanted[: ranks * each], f"Only {others}: --rank R shows another.")
    shown = max(lines, 1)
    of_rank = wanted[0].rank
    left_out = f"Only micro-batches 0 to {shown - 1} of the {each} of rank {of_rank}: --json has all."
    return Selection([one for one in wanted if one.rank == of_rank][:shown], left_out)


def step_as_json(step: InspectedStep, rank: int | None) -> str:
    """Return the step as one JSON object, with the fields of the classes above."""
    found = asdict(step)
    found["micro_batches"] = [each for each in found["micro_batches"] if rank in (None, each["rank"])]
    return json.dumps(found, indent=2, ensure_ascii=False)


def show_step(step: InspectedStep, selection: Selection, console: Console) -> None:
    """Show a line for each micro-batch."""
    right = [Column(name, justify="right") for name in ("rank", "micro-batch", "samples", "tokens", "fill")]
    table = Table(*right, Column("sources"), title=f"step {step.step}", title_justify="left", title_style="bold")
    for each in selection.micro_batches:
        table.add_row(
            str(each.rank),
            f"{each.index}{' (filler)' if each.filler else ''}",
            f"{len(each.samples):,}",
            f"{each.tokens:,}",
            f"{each.tokens / (each.rows * each.width):.1%}",
            _named(each.samples),
            style="dim" if each.filler else "",
        )
    console.print(table)
    if selection.left_out:
        console.print(selection.left_out, style="yellow", highlight=False)


def _named(samples: Sequence[PlacedSample]) -> str:
    """Return the sources with the most samples."""
    named = [source for source, _ in Counter(sample.source for sample in samples).most_common()]
    return escape(names(map(short_name, named), NAMED))
