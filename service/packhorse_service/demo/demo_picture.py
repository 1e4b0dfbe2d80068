"""Draw the first packs: segments, padding, what is trained on, and which rank holds what.

Above, every pack as a bar over its slots. Below, some slots of one pack magnified, with their tokens.

Shapes: T = row width in slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle
from tokenizers import Tokenizer

from packhorse_service.demo.packs import Pack
from packhorse_service.text.drawing import INK, PADDING, SHADES, strip

__all__ = ["draw_packs"]

ON_SHADES = ("white", INK)  # text on them
TRAINED = ("#e6eaee", "#2e7d5b")  # by loss mask
HOLDERS = ("#6c5b9e", "#cfc6e6", "#3e3566", "#a493cf")  # by context-parallel rank
CELL_TEXT: dict[str, Any] = {
    "rotation": 90,
    "ha": "center",
    "va": "center",
    "family": "monospace",
    "fontsize": 8,
    "parse_math": False,  # a $ is a $
}
MAGNIFIED = 64  # slots


class Band(NamedTuple):
    """Band of a pack's drawing: part of the unit of height that a pack takes, counted from its top."""

    top: float
    height: float

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


SEGMENTS, MASK, HOLDER = Band(0.08, 0.48), Band(0.60, 0.12), Band(0.75, 0.12)


def draw_packs(packs: Sequence[Pack], tokenizer: Tokenizer, path: Path) -> None:
    """Draw ``packs``, at least one, as a PNG."""
    sources = sorted({source for pack in packs for source in pack.sources})
    heights = [0.6 * len(packs) + 0.4, 2.3]
    layout = ConstrainedLayoutEngine(h_pad=0.15, w_pad=0.15)
    figure = Figure(figsize=(14, sum(heights) + 1.6), dpi=120, layout=layout)
    overview, magnified = figure.subplots(2, 1, height_ratios=heights)
    _draw_overview(overview, packs, sources)
    at, start = _most_telling(packs)
    _draw_magnified(magnified, packs[at], start, sources, tokenizer)
    overview.add_patch(Rectangle((start, at + 0.03), MAGNIFIED, 0.89, fill=False, edgecolor=INK, linewidth=1.4))
    figure.legend(handles=_legend(packs, sources), loc="outside lower center", ncols=8, frameon=False, labelcolor=INK)
    figure.savefig(path)


def _draw_overview(axes: Axes, packs: Sequence[Pack], sources: list[str]) -> None:
    for y, pack in enumerate(packs):
        _draw_pack(axes, y, pack, sources)
    width = max(len(pack.tokens) for pack in packs)
    slots = sum(len(pack.tokens) for pack in packs)
    filled = sum(int(pack.cu_seqlens[-1]) for pack in packs)
    title = f"The first {len(packs)} packs of {width:,} slots, {filled / slots:.1%} filled"
    axes.set_title(title, loc="left", color=INK, fontsize=14, fontweight="bold", pad=10)
    labels = [f"step {p.place.step}, data rank {p.place.data}\nmicro-batch {p.place.index}" for p in packs]
    axes.set_yticks([y + 0.46 for y in range(len(packs))], labels, color=INK, fontsize=9)
    strip(axes, (0, width), (len(packs), 0))


def _draw_magnified(axes: Axes, pack: Pack, start: int, sources: list[str], tokenizer: Tokenizer) -> None:
    stop = min(start + MAGNIFIED, len(pack.tokens))
    _draw_pack(axes, 0, pack, sources)
    axes.vlines(range(start, stop), SEGMENTS.top, SEGMENTS.bottom, color="white", linewidth=0.8)
    for number, (first, end, _) in enumerate(pack.segments):
        for slot in range(max(first, start), min(end, stop)):
            text = _printable(tokenizer, int(pack.tokens[slot]))
            axes.text(slot + 0.5, SEGMENTS.middle, text, color=ON_SHADES[number % 2], **CELL_TEXT)
    title = f"Slots {start} to {stop - 1} of {pack.place}, with their tokens"
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=8)
    names = {"tokens": SEGMENTS, "loss mask": MASK, "context rank": HOLDER}
    axes.set_yticks([band.middle for band in names.values()], list(names), color=INK, fontsize=9)
    strip(axes, (start, stop), (HOLDER.bottom, SEGMENTS.top))


def _draw_pack(axes: Axes, y: int, pack: Pack, sources: list[str]) -> None:
    """Draw one pack as three bands below ``y``: segments, loss mask, holder."""

    def bar(band: Band, start: int, end: int, **style: Any) -> None:
        axes.broken_barh([(start, end - start)], (y + band.top, band.height), **style)

    for number, (start, end, padded_end) in enumerate(pack.segments):
        if end > start:
            shades = SHADES[sources.index(pack.sources[number]) % len(SHADES)]
            bar(SEGMENTS, start, end, facecolor=shades[number % 2], edgecolor="white", linewidth=0.6)
        if padded_end > end:
            bar(SEGMENTS, end, padded_end, **PADDING)
    for start, end in _runs(pack.loss_mask):
        bar(MASK, start, end, facecolor=TRAINED[int(pack.loss_mask[start])], linewidth=0)
    for start, end in _runs(pack.holder):
        bar(HOLDER, start, end, facecolor=HOLDERS[pack.holder[start] % len(HOLDERS)], linewidth=0)


def _runs(values: npt.NDArray[Any]) -> Iterable[tuple[int, int]]:
    """[start, end) of each run of equal ``values``, [T]."""
    return pairwise([0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)])


def _most_telling(packs: Sequence[Pack]) -> tuple[int, int]:
    """(which pack, first slot) of the stretch that shows most: its padding and its changes of the loss mask."""

    def telling(place: tuple[int, int]) -> int:
        at, start = place
        mask = packs[at].loss_mask[start : start + MAGNIFIED]
        padded = sum(start <= end < padded_end < start + MAGNIFIED for _, end, padded_end in packs[at].segments)
        return int(np.count_nonzero(np.diff(mask))) + padded

    lasts = [max(1, len(pack.tokens) - MAGNIFIED) for pack in packs]
    return max(((at, start) for at, last in enumerate(lasts) for start in range(0, last, 8)), key=telling)


def _printable(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as visible ASCII, which every font has."""
    text = tokenizer.decode([token], skip_special_tokens=False).encode("ascii", "replace").decode()
    return text.replace("\n", "↵").replace(" ", "·")


def _legend(packs: Sequence[Pack], sources: list[str]) -> list[Patch]:
    ranks = max(int(pack.holder.max()) for pack in packs) + 1
    return [
        *(Patch(facecolor=SHADES[at % len(SHADES)][0], label=f"from {name}") for at, name in enumerate(sources)),
        Patch(label="padding", **PADDING),
        Patch(facecolor=TRAINED[1], label="trained on"),
        Patch(facecolor=TRAINED[0], label="not trained on"),
        *(Patch(facecolor=HOLDERS[rank % len(HOLDERS)], label=f"held by context rank {rank}") for rank in range(ranks)),
    ]
