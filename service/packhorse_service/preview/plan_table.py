"""A report for a person: what is planned, sources, samples over length, and other pack lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table

from packhorse_service.preview.plan_report import BeforeAfter, OverLengthReport, PlanReport, Stop
from packhorse_service.preview.unit_names import unit_of
from packhorse_service.text.formatting import plural_of, pluralise

__all__ = ["progress", "show"]

CHOICES = "split, truncate_left, truncate_right or drop"


@contextmanager
def progress(console: Console, steps: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, which the function given moves; ``steps`` in all, if that is known."""
    columns = (SpinnerColumn(), TextColumn("planning"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=steps)

        def advance(done: int, samples: int) -> None:
            bar.update(task, completed=done, description=f"{done:,} steps, {samples:,} samples")

        yield advance


def show(report: PlanReport, console: Console) -> None:
    """All of it, as tables."""
    setting = report.setting
    unit = unit_of(setting.packing, setting.micro_batch_size)
    micro_batches = setting.num_microbatches * setting.data_parallel
    console.print(
        f"[bold]{escape(setting.origin)}[/]: packing {setting.packing}, seq_length {setting.seq_length:,}, "
        f"{pluralise(micro_batches, unit)} a step, data-parallel {setting.data_parallel:,}",
        highlight=False,
    )
    console.print(_figures(report, unit))
    if len(report.sources) > 1:
        console.print(_sources(report))
    if report.over_length is not None and report.over_length.samples:
        console.print(_over_length(report.over_length))
    if report.comparison is not None:
        console.print(_comparison(report))
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
    if report.recommendation is not None:
        console.print(f"[bold]Recommended:[/] {report.recommendation.reason}.", highlight=False)
    if report.over_length is not None and report.over_length.stop is not None:
        console.print(_stop(report.over_length.stop, report.over_length.limit), highlight=False)


def _joined(*remarks: str) -> str:
    return "; ".join(filter(None, remarks))


# Figures -------------------------------------------------------------------------------------------------

FigureRow = tuple[str, str, str]  # what, how much, and a remark


def _figures(report: PlanReport, unit: str) -> Table:
    columns = (Column(style="bold", no_wrap=True), Column(no_wrap=True), Column(style="dim"))
    table = Table(*columns, show_header=False, box=None)
    for rows in (
        _size_rows(report, unit),
        _fill_rows(report, unit),
        _order_rows(report),
        _balance_rows(report),
    ):
        for row in rows:
            table.add_row(*row)
    return table


def _size_rows(report: PlanReport, unit: str) -> Iterator[FigureRow]:
    samples, over = report.samples, report.fill.packs_over
    epochs = max(source.epochs for source in report.sources)
    skipped = sum(source.skipped for source in report.sources)
    unsupervised = sum(source.unsupervised for source in report.sources)
    passes = f"{pluralise(epochs, 'epoch')} begun"
    yield (
        "steps",
        f"{report.steps:,}",
        f"to the end of the stream, {passes}" if report.complete else f"then stopped, {passes}",
    )
    yield (
        "samples",
        f"{samples.count:,}",
        _joined(
            f"median {samples.lengths.p50:,}, p99 {samples.lengths.p99:,}, longest {samples.lengths.max:,} slots",
            f"{samples.empty:,} without a slot left out" if samples.empty else "",
            f"{skipped:,} more skipped as unusable" if skipped else "",
            f"{unsupervised:,} tokens without a loss left out" if unsupervised else "",
        ),
    )
    yield (
        plural_of(unit),
        f"{report.micro_batches:,}",
        _joined(
            "" if over is None else f"{over:,} over the lower bound",
            f"{pluralise(report.fillers, 'filler')} at the end" if report.fillers else "",
            f"{report.dropped:,} more at the end dropped" if report.dropped else "",
        ),
    )


def _fill_rows(report: PlanReport, unit: str) -> Iterator[FigureRow]:
    fill, segments, setting = report.fill, report.segments, report.setting
    if fill.useful_at_most is None:
        yield "fill", f"{fill.useful:.2%}", "of the slots hold a token"
    else:
        bound = f"alignment to {setting.segment_multiple:,} allows {fill.useful_at_most:.2%}"
        yield "slot fill", f"{fill.slot:.2%}", "of the slots are in segments"
        yield "useful fill", f"{fill.useful:.2%}", f"hold a token; {bound}"
    if segments is not None:
        limit = setting.max_segments
        fixed = "for max_segments" if limit is None else f"max_segments is {limit:,}"
        spread = f"{segments.p50:,} / {segments.p99:,} / {segments.max:,}"
        yield f"segments a {unit}", spread, f"p50 / p99 / most, {fixed}"
    yield "unsupervised", pluralise(report.unsupervised, unit), "with nothing to train on"


def _order_rows(report: PlanReport) -> Iterator[FigureRow]:
    if report.order is not None:
        yield (
            "longest wait",
            pluralise(report.order.longest_wait, "pack"),
            f"at a lookahead of {report.setting.lookahead:,}",
        )
        yield "most late", pluralise(report.order.most_late, "sample"), "behind the place of arrival"


def _balance_rows(report: PlanReport) -> Iterator[FigureRow]:
    balance = report.balance
    if balance is None:
        yield "imbalance", "none", "dense rows cost the same"
        return
    yield "imbalance", _arrow(balance.synchronous), f"of micro-batches, {_worst(balance.synchronous)}"
    yield "", _arrow(balance.totals), f"of steps, {_worst(balance.totals)}"
    yield "", "", "slowest rank ÷ mean, by arrival → as planned"


def _arrow(figures: BeforeAfter) -> str:
    return f"{figures.before.mean:.3f} → {figures.after.mean:.3f}"


def _worst(figures: BeforeAfter) -> str:
    return f"worst {figures.before.worst:.3f} → {figures.after.worst:.3f}"


# Tables --------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    """Return a table that fits 80 columns: names to the left, numbers to the right."""
    numbers = [Column(name, justify="right", no_wrap=True) for name in columns[1:]]
    shape: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "title_justify": "left", "title_style": "bold"}
    return Table(Column(columns[0], overflow="fold"), *numbers, title=title, **shape)


def _sources(report: PlanReport) -> Table:
    table = _table(
        f"Sources, mixed by {report.setting.mixed_by}",
        "source",
        "samples",
        "epochs",
        "tokens",
        "weight",
        "share",
        "in a step",
    )
    for source in report.sources:
        table.add_row(
            escape(source.name),
            f"{source.samples:,}",
            f"{source.epochs:,}",
            f"{source.tokens:,}",
            f"{source.weight:.1%}",
            f"{source.share:.1%}",
            f"{source.least:.1%} … {source.most:.1%}",
        )
    return table


def _over_length(over: OverLengthReport) -> Table:
    title = (
        f"{pluralise(over.samples, 'sample')} over {over.limit:,} slots hold {over.tokens:,} tokens, {over.share:.1%}"
    )
    table = _table(title, "over_length", "samples cut or dropped", "tokens lost", "extra pieces")
    table.add_row("error", "[red]stops at the first[/]", "", "")
    for policy, cost in over.policies.items():
        table.add_row(policy, f"{cost.samples:,}", f"{cost.tokens_lost:,}", f"{cost.extra_pieces:,}")
    return table


def _comparison(report: PlanReport) -> Table:
    columns = ("batch", "fill", "segments", "lost", "imbalance", "busy", "whole", "worth")
    table = _table("Other values of seq_length, at the same slots a step", "length", *columns)
    for each in report.comparison or ():
        taken = report.recommendation is not None and each.seq_length == report.recommendation.seq_length
        table.add_row(
            f"{each.seq_length:,}",
            f"{each.global_batch_size:,}",
            f"{each.useful_fill:.2%}",
            f"{each.segments.p50:,} / {each.segments.max:,}",
            f"{each.lost:.1%}",
            f"{each.synchronous:.3f}",
            f"{each.busy:.1%}",
            f"{each.whole:.1%}",
            f"{each.worth:.1%}",
            style="bold green" if taken else "",
        )
    return table


def _stop(stop: Stop, limit: int) -> str:
    return (
        f"[bold red]serve would stop:[/] {escape(stop.setting)} is error, and {escape(stop.place)} has {stop.slots:,} "
        f"slots, more than {limit:,}. Planned without such samples; set it to {CHOICES}, or raise seq_length."
    )
