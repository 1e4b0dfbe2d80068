"""A planned step to what travels: for each data-parallel coordinate and context-parallel slice, its views.

A view is built once and shared by every reader that gets it: tensor- and pipeline-parallel peers of one
coordinate receive the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packhorse.context_parallel import Partition
from packhorse.contract import ResolvedContract
from packhorse.layout import Coordinates, ParallelLayout
from packhorse.row import Row
from packhorse.views import view_arrays
from packhorse.wire import BatchBody

__all__ = ["FramedStep", "View", "frame_step", "view_of"]

ViewKey = tuple[int, int]  # data-parallel coordinate, context-parallel slice (0 where rows are whole)


@dataclass(frozen=True, slots=True)
class View:
    """One micro-batch as some readers receive it. The payload is never changed once made."""

    body: BatchBody
    payload: bytearray


@dataclass(frozen=True, slots=True)
class FramedStep:
    """A whole step, ready to send; ``snapshot`` is the stream behind it."""

    step: int
    views: Mapping[ViewKey, tuple[View, ...]]  # [num_microbatches] each
    snapshot: bytes


def view_of(reader: Coordinates, contract: ResolvedContract) -> ViewKey:
    """Which view a reader gets."""
    return reader.data, 0 if contract.partition is Partition.WHOLE else reader.context


def frame_step(
    step: int,
    rows: Sequence[Sequence[Row]],
    snapshot: bytes,
    contract: ResolvedContract,
    layout: ParallelLayout,
    *,
    with_keys: bool,
) -> FramedStep:
    """``rows[rank][index]``: the row of each data-parallel rank's micro-batch."""
    everything = [row for of_rank in rows for row in of_rank]
    totals = {
        "step_tokens": sum(row.num_tokens for row in everything if not row.filler),
        "step_loss_tokens": sum(row.num_loss_tokens for row in everything),
    }
    slices = 1 if contract.partition is Partition.WHOLE else layout.context
    views: dict[ViewKey, list[View]] = {(rank, cut): [] for rank in range(len(rows)) for cut in range(slices)}
    for rank, of_rank in enumerate(rows):
        for index, row in enumerate(of_rank):
            digest = row.digest(step, index)
            for cut in range(slices):
                table, payload, slots = view_arrays(row, contract, layout, cut, with_keys=with_keys)
                body = BatchBody(
                    step=step,
                    index=index,
                    num_tokens=row.num_tokens,
                    num_loss_tokens=row.num_loss_tokens,
                    max_seqlen=int(np.diff(row.cu_seqlens_padded).max()),
                    slots=slots,
                    filler=row.filler,
                    row_digest=digest,
                    arrays=table,
                    **totals,
                )
                views[rank, cut].append(View(body, payload))
    return FramedStep(step, {key: tuple(of_view) for key, of_view in views.items()}, snapshot)
