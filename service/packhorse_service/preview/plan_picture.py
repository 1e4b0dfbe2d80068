"""A report as a picture: lengths of samples, fill of each step, balance of each step, cost of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from packhorse_service.preview.plan_report import BeforeAfter, PlanReport
from packhorse_service.text.drawing import ACCENT, FAINT, INK, PALE, SHADES, save, title

__all__ = ["plot"]

BEFORE, AFTER = SHADES[0][0], ACCENT
RARE = 0.02  # of the steps may lie outside the axes
EVEN = 0.01  # imbalance below this looks even
MANY_STEPS = 60  # from here on, lines without a mark for each step


def plot(report: PlanReport, path: Path) -> None:
    """Draw a report and write it as a PNG."""
    layout = ConstrainedLayoutEngine(h_pad=0.18, w_pad=0.18)
    drawings = OF_SAMPLES if report.balance is None else (*OF_SAMPLES, *OF_RANKS)
    figure = Figure(figsize=(14, 0.8 + 2.1 * len(drawings)), dpi=110, layout=layout)
    setting = report.setting
    figure.suptitle(
        f"{setting.origin}: packing {setting.packing}, seq_length {setting.seq_length:,}, batch size "
        f"{setting.global_batch_size:,}, {setting.data_parallel:,} data-parallel ranks, {report.steps:,} steps",
        x=0.01,
        ha="left",
        color=INK,
        fontsize=13,
        parse_math=False,
    )
    for axes, draw in zip(figure.subplots(len(drawings) // 2, 2).flat, drawings, strict=True):
        draw(axes, report)
    save(figure, path)


def _draw_lengths(axes: Axes, report: PlanReport) -> None:
    """Bars over logarithmic lengths: how many samples, and how many of all tokens."""
    bins = report.samples.histogram
    edges = [*(each.low for each in bins), bins[-1].high + 1]
    for values, color, name in (
        ([each.samples / report.samples.count for each in bins], FAINT, "samples"),
        ([each.tokens / report.samples.tokens for each in bins], ACCENT, "tokens"),
    ):
        filled = name == "samples"
        axes.stairs(
            values,
            edges,
            fill=filled,
            color=PALE if filled else color,
            alpha=0.45 if filled else 1,
            label=name,
            linewidth=1.6,
        )
    limit = report.setting.seq_length if report.over_length is None else report.over_length.limit
    axes.axvline(limit, color=BEFORE, linewidth=1.4)
    axes.text(limit, 0.98, f" {limit:,}", color=BEFORE, fontsize=9, va="top", transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[0], max(edges[-1], limit * 1.5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda slots, _: f"{slots:,.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    over = report.over_length
    beyond = f", {over.share:.1%} of the tokens in samples over length" if over is not None and over.samples else ""
    title(axes, f"Slots of a sample{beyond}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    _finish(axes, "slots of a sample", "share")


def _draw_fill(axes: Axes, report: PlanReport) -> None:
    useful = [step.useful_fill for step in report.per_step]
    best = report.fill.useful_at_most
    if best is not None and best < 1:
        _line(axes, [step.slot_fill for step in report.per_step], PALE, "slot fill")
    _line(axes, useful, AFTER, "useful fill")
    if best is not None:
        axes.axhline(best, color=BEFORE, linewidth=1, linestyle="--", label="alignment allows")
    whole = [step.useful_fill for step in report.per_step if not step.fillers] or useful
    room = 1 - float(np.quantile(whole, RARE))
    axes.set_ylim(max(0.0, 1 - 1.5 * room - 0.002), 1 + 0.1 * room + 0.0005)
    _tell_beyond(axes, min(useful), f"{min(useful):.1%} in step {int(np.argmin(useful))}", "bottom")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    title(axes, f"Fill of a step, {report.fill.useful:.2%} in all")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="lower left")
    _finish(axes, "step", "of the row slots")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_balance(axes: Axes, report: PlanReport) -> None:
    before = [step.synchronous_before or 1.0 for step in report.per_step]
    after = [step.synchronous_after or 1.0 for step in report.per_step]
    _line(axes, before, BEFORE, "as packs arrive")
    _line(axes, after, AFTER, "as planned")
    high = max(float(np.quantile(values, 1 - RARE)) for values in (before, after))
    axes.set_ylim(1, 1 + 1.3 * (high - 1) + 0.001)
    _tell_beyond(axes, max(after), f"{max(after):.3f} as planned in step {int(np.argmax(after))}", "top")
    figures = "" if report.balance is None else _means(report.balance.synchronous)
    title(axes, f"Imbalance of a step{figures}")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left")
    _finish(axes, "step", "slowest rank of each micro-batch ÷ mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _means(figures: BeforeAfter) -> str:
    return f": {figures.before.mean:.3f} as packs arrive, {figures.after.mean:.3f} as planned"


def _draw_ranks(axes: Axes, report: PlanReport) -> None:
    """Ranks by cost, so that two curves show how uneven each is."""
    costs = report.rank_costs
    if costs is None:
        return
    places = np.arange(len(costs.before) + 1) - 0.5
    for values, color, name in ((costs.before, BEFORE, "as packs arrive"), (costs.after, AFTER, "as planned")):
        axes.stairs(sorted(values, reverse=True), places, color=color, label=name, linewidth=1.8, baseline=None)
    axes.axhline(1, color=PALE, linewidth=0.8)
    axes.set_xlim(places[0], places[-1])
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1 - EVEN), max(high, 1 + EVEN))
    title(axes, f"Cost of each rank in step {costs.step}, which arrival order balances worst")
    axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    _finish(axes, "ranks, dearest first", "÷ mean of the ranks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _tell_beyond(axes: Axes, value: float, text: str, edge: str) -> None:
    """Say what lies outside the axes: one odd step, such as the last, must not flatten all others."""
    low, high = axes.get_ylim()
    if not low <= value <= high:
        place = {"top": 0.98, "bottom": 0.02}[edge]
        axes.text(0.99, place, text, color=PALE, fontsize=9, ha="right", va=edge, transform=axes.transAxes)


def _line(axes: Axes, values: Sequence[float], color: str, name: str) -> None:
    few = len(values) <= MANY_STEPS
    axes.plot(values, color=color, label=name, linewidth=1.3 if few else 0.8, marker="o" if few else None, markersize=3)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, color=PALE, fontsize=9)
    axes.set_ylabel(y, color=PALE, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(labelcolor=PALE, labelsize=8, color=FAINT)


OF_SAMPLES = (_draw_lengths, _draw_fill)
OF_RANKS = (_draw_balance, _draw_ranks)
