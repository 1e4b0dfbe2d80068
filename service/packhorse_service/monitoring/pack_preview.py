"""A step as an operator sees it: how full its rows are, and what lies in some of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.rows.row import Row
from packhorse_service.framing import FramedStep
from packhorse_service.monitoring.status import PackStatus

__all__ = ["NO_PREVIEW", "StepPreview", "preview_of"]

PICTURED = 12  # rows
NO_STEP = -1


class StepPreview(NamedTuple):
    """Preview of one step, of which nothing else is kept. Fillers do not count."""

    step: int
    fill: float = 0.0  # slots of segments with their alignment padding, by row slots
    useful_fill: float = 0.0  # tokens by row slots
    packs: tuple[PackStatus, ...] = ()
    snapshot_bytes: int = 0


NO_PREVIEW = StepPreview(NO_STEP)


def preview_of(step: FramedStep, before: StepPreview) -> StepPreview:
    """Return the preview of a step; that from ``before`` where it is the same step."""
    if step.step == before.step:
        return before
    rows = [row for of_rank in step.rows for row in of_rank if not row.filler]
    slots = sum(row.width for row in rows) or 1
    return StepPreview(
        step=step.step,
        fill=round(sum(int(_padded_lengths(row).sum()) for row in rows) / slots, 4),
        useful_fill=round(sum(row.num_tokens for row in rows) / slots, 4),
        packs=tuple(islice(_pictures(step), PICTURED)),
        snapshot_bytes=len(step.snapshot),
    )


def _padded_lengths(row: Row) -> npt.NDArray[np.int32]:
    """Return [L] int32: slots of each segment that holds a sample, with its padding; that of the tail is none."""
    padded: npt.NDArray[np.int32] = np.diff(row.cu_seqlens_padded)[np.diff(row.cu_seqlens) > 0]
    return padded


def _pictures(step: FramedStep) -> Iterator[PackStatus]:
    """Yield the first micro-batch of every data-parallel rank, then the second, and so on."""
    for index in range(max(map(len, step.rows), default=0)):
        for rank, of_rank in enumerate(step.rows):
            yield _picture(rank, index, of_rank[index])


def _picture(rank: int, index: int, row: Row) -> PackStatus:
    lengths = np.diff(row.cu_seqlens)
    return PackStatus(
        width=row.width,
        lengths=tuple(lengths[lengths > 0].tolist()),
        padded_lengths=tuple(_padded_lengths(row).tolist()),
        rank=rank,
        index=index,
        filler=row.filler,
    )
