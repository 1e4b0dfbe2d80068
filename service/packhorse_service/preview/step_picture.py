"""The rows of a step as bars: which samples sit where, by source, and what is padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from packhorse_service.preview.inspected_step import InspectedStep, PlacedMicroBatch, PlacedSample, Selection
from packhorse_service.preview.unit_names import short_name, unit_of
from packhorse_service.text.drawing import INK, PADDING, PALE, SHADES, save, strip, title
from packhorse_service.text.formatting import pluralise

__all__ = ["draw_step"]

OTHERS = ("#6b7580", "#b4bcc4")  # sources beyond those with a colour of their own
KEY_ROOM = 0.0075  # share of a row's width that a character of a key takes
TOP, HEIGHT = 0.08, 0.84  # of a bar within its line
FILLER = 0.35  # opacity

Shades = Mapping[str, tuple[str, str]]


def draw_step(step: InspectedStep, selection: Selection, path: Path) -> None:
    """Write a PNG of the rows selected."""
    lines = [(each, row) for each in selection.micro_batches for row in range(each.rows)]
    shades = _shades(step.sources, _slots(selection.micro_batches))
    height = max(0.24, min(0.5, 5 / len(lines)))
    figure = Figure(
        figsize=(14, height * len(lines) + 1.9), dpi=110, layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
    )
    axes = figure.subplots()
    width = max(each.width for each in selection.micro_batches)
    for y, (micro_batch, row) in enumerate(lines):
        _draw_row(axes, y, micro_batch, row, shades, width)
        if y and micro_batch.rank != lines[y - 1][0].rank:
            axes.axhline(y, color=PALE, linewidth=0.6)
    title(axes, _headline(step, selection), 13)
    axes.set_yticks([y + 0.5 for y in range(len(lines))], [_label(*line) for line in lines], color=INK, fontsize=8)
    strip(axes, (0, width), (len(lines), 0))
    figure.legend(
        handles=_legend(selection.micro_batches, shades),
        loc="outside lower left",
        ncols=5,
        frameon=False,
        labelcolor=INK,
    )
    save(figure, path)


def _headline(step: InspectedStep, selection: Selection) -> str:
    shown = selection.micro_batches
    slots = sum(each.rows * each.width for each in shown)
    filled = sum(each.tokens for each in shown) / slots
    what = pluralise(len(shown), unit_of(step.packing, shown[0].rows))
    return f"Step {step.step}: {what}, {filled:.1%} of the slots hold a token. {selection.left_out}"


def _label(micro_batch: PlacedMicroBatch, row: int) -> str:
    name = f"rank {micro_batch.rank}, micro-batch {micro_batch.index}"
    name += f", row {row}" if micro_batch.rows > 1 else ""
    return name + (" (filler)" if micro_batch.filler else "")


def _draw_row(axes: Axes, y: int, micro_batch: PlacedMicroBatch, row: int, shades: Shades, width: int) -> None:
    band, alpha = (y + TOP, HEIGHT), FILLER if micro_batch.filler else 1.0
    axes.broken_barh([(0, micro_batch.width)], band, **PADDING)
    samples = [sample for sample in micro_batch.samples if sample.row == row]
    spans: dict[str, list[tuple[int, int]]] = {}
    for number, sample in enumerate(samples):
        shade = shades[sample.source][number % 2]
        spans.setdefault(shade, []).append((sample.start, sample.slots))
        _draw_key(axes, y, sample, "white" if number % 2 == 0 else INK, width)
    for shade, of_shade in spans.items():
        # Bars of the padding's colour below keep the hatching out of translucent fillers.
        axes.broken_barh(of_shade, band, facecolor="white", linewidth=0)
        axes.broken_barh(of_shade, band, facecolor=shade, linewidth=0, alpha=alpha)


def _draw_key(axes: Axes, y: int, sample: PlacedSample, color: str, width: int) -> None:
    """Return the key of a sample, and which of its ids where they are not all, as far as there is room."""
    part = sample.end - sample.begin < sample.ids
    texts = [f"{sample.key}, ids {sample.begin:,} to {sample.end - 1:,} of {sample.ids:,}"] if part else []
    for text in (*texts, sample.key):
        if len(text) * KEY_ROOM * width < sample.slots:
            middle = sample.start + sample.slots / 2
            axes.text(middle, y + 0.5, text, color=color, fontsize=7, ha="center", va="center", parse_math=False)
            return


# Sources -------------------------------------------------------------------------------------------------


def _slots(micro_batches: Sequence[PlacedMicroBatch]) -> Counter[str]:
    slots: Counter[str] = Counter()
    for each in micro_batches:
        for sample in each.samples:
            slots[sample.source] += sample.slots
    return slots


def _shades(sources: Sequence[str], slots: Counter[str]) -> Shades:
    """Choose a pair of shades a source, the same in every step; with many sources, only for the largest of this one."""
    if len(sources) > len(SHADES):
        largest = {source for source, _ in slots.most_common(len(SHADES) - 1)}
        sources = [source for source in sources if source in largest]
    own = dict(zip(sources, SHADES, strict=False))
    return {source: own.get(source, OTHERS) for source in (*sources, *slots)}


def _legend(micro_batches: Sequence[PlacedMicroBatch], shades: Shades) -> list[Patch]:
    slots = _slots(micro_batches)
    total = sum(slots.values())
    others = [source for source, pair in shades.items() if pair is OTHERS]
    handles = [
        Patch(facecolor=pair[0], label=f"{short_name(source)} {slots[source] / total:.1%}")
        for source, pair in shades.items()
        if pair is not OTHERS and source in slots
    ]
    if others:
        share = sum(slots[source] for source in others) / total
        handles.append(Patch(facecolor=OTHERS[0], label=f"{len(others)} more sources {share:.1%}"))
    return [*handles, Patch(label="padding", **PADDING)]
