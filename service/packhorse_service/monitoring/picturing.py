"""The rows of a step as an operator sees them: how full they are, and what lies in some of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packhorse.row import Row
from packhorse_service.framing import FramedStep
from packhorse_service.monitoring.status import PackStatus

__all__ = ["Fill", "fill_of", "pictures"]

PICTURED = 12  # rows


class Fill(NamedTuple):
    """Of one step, as a share of the slots of its rows."""

    physical: float = 0.0  # slots of segments with their alignment padding
    useful: float = 0.0  # tokens


def fill_of(step: FramedStep | None) -> Fill:
    """Of the rows of a step that are no fillers."""
    rows = [row for of_rank in step.rows for row in of_rank if not row.filler] if step else []
    slots = sum(row.width for row in rows)
    if not slots:
        return Fill()
    occupied = sum(int(_padded_lengths(row).sum()) for row in rows)
    return Fill(round(occupied / slots, 4), round(sum(row.num_tokens for row in rows) / slots, 4))


def _padded_lengths(row: Row) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[L] slots of each segment that holds a sample, with its padding; that of the tail is none."""
    lengths = np.diff(row.cu_seqlens)
    padded: np.ndarray[tuple[int], np.dtype[np.int32]] = np.diff(row.cu_seqlens_padded)[lengths > 0]
    return padded


def pictures(step: FramedStep | None) -> tuple[PackStatus, ...]:
    """Some rows of a step: those of the first data-parallel ranks, in turn."""
    if step is None:
        return ()
    placed = [
        (rank, index, of_rank[index])
        for index in range(max(map(len, step.rows), default=0))
        for rank, of_rank in enumerate(step.rows)
        if index < len(of_rank)
    ]
    return tuple(_picture(rank, index, row) for rank, index, row in placed[:PICTURED])


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
