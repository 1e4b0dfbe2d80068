"""A planned step to what travels: the views that its readers need of each row.

A view is built once and shared by every reader that gets it: tensor-parallel peers of one coordinate
receive the same bytes. A pipeline stage gets only the fields it uses, a middle stage no tokens at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from packhorse.codec.pipeline_stages import needed, stage_of
from packhorse.codec.views import EVERYTHING, view_arrays
from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rows.row import Row
from packhorse.wire.messages import BatchBody

__all__ = ["FramedStep", "StepTotals", "View", "ViewKey", "frame_step", "view_key"]


class ViewKey(NamedTuple):
    """Key that tells one view of a row from another."""

    data: int  # data-parallel coordinate
    context_rank: int = 0  # whose slice of the row; 0 where rows are whole
    needs: frozenset[str] = EVERYTHING  # of the fields that travel


@dataclass(frozen=True, slots=True)
class View:
    """Micro-batch as some readers receive it. The payload is never changed once made."""

    body: BatchBody
    payload: bytearray


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals over the micro-batches of all data-parallel ranks of a step; a filler is all padding."""

    microbatches: int = 0
    tokens: int = 0  # real slots
    loss_tokens: int = 0  # real slots that count in the loss
    slots: int = 0  # of the rows, padding included


@dataclass(slots=True)
class FramedStep:
    """Step of all data-parallel ranks, ready to send; ``snapshot`` is that of the stream behind it."""

    step: int
    snapshot: bytes
    frame: Callable[[ViewKey], tuple[View, ...]] = field(compare=False, repr=False)  # makes the views of a key
    views: dict[ViewKey, tuple[View, ...]] = field(default_factory=dict)  # [num_microbatches] each
    # (data-parallel rank, index) -> the samples of that row, for people
    provenance: Callable[[int, int], str] = field(default=lambda rank, index: "", compare=False, repr=False)
    totals: StepTotals = StepTotals()
    rows: Sequence[Sequence[Row]] = field(default=(), compare=False, repr=False)  # [rank][index], for people

    def views_of(self, key: ViewKey) -> tuple[View, ...]:
        """Return a view of each micro-batch of the key's data-parallel rank, made when first asked for."""
        if key not in self.views:
            self.views[key] = self.frame(key)
        return self.views[key]


def view_key(
    reader: Coordinates,
    contract: ResolvedContract,
    layout: ParallelLayout,
    *,
    mtp: bool = False,
    tokens: bool = False,
) -> ViewKey:
    """Return which view a reader gets.

    ``mtp`` where its trainer has multi-token-prediction layers: they are on the last stage, but where the layout names
    others. ``tokens`` where its step reads tokens on every stage.
    """
    holds_mtp = reader.pipeline in layout.mtp_stages or (mtp and reader.pipeline == layout.pipeline - 1)
    uses = needed(stage_of(layout, reader.pipeline), packed=contract.packed, mtp=holds_mtp, tokens=tokens)
    context_rank = 0 if contract.partition is Partition.WHOLE else reader.context
    return ViewKey(reader.data, context_rank, uses & EVERYTHING)


def frame_step(
    step: int,
    rows: Sequence[Sequence[Row]],
    snapshot: bytes,
    contract: ResolvedContract,
    layout: ParallelLayout,
    *,
    with_keys: bool,
) -> FramedStep:
    """Frame a step: the rows of its micro-batches, ``rows[rank][index]`` of each data-parallel rank.

    ``snapshot`` is that of the stream behind the step; ``with_keys``: the keys of samples travel too.
    The views of every coordinate are made here; those of a multi-token-prediction stage when they are asked for.
    """
    everything = [row for of_rank in rows for row in of_rank]
    totals = StepTotals(
        len(everything),
        sum([row.num_tokens for row in everything if not row.filler]),
        sum([row.num_loss_tokens for row in everything]),
        sum([row.width for row in everything]),
    )
    longest = iter(_longest(everything))
    facts = [[(row, row.digest(step, index), next(longest)) for index, row in enumerate(of_rank)] for of_rank in rows]

    def frame(key: ViewKey) -> tuple[View, ...]:
        return tuple([frame_row(key, index, *of_row) for index, of_row in enumerate(facts[key.data])])

    def frame_row(key: ViewKey, index: int, row: Row, digest: bytes, longest: int) -> View:
        view = view_arrays(row, contract, layout, key.context_rank, key.needs, with_keys=with_keys)
        body = BatchBody(
            step=step,
            index=index,
            num_tokens=row.num_tokens,
            num_loss_tokens=row.num_loss_tokens,
            local_loss_tokens=view.loss_tokens,
            max_seqlen=contract.max_width if contract.pad_cu_seqlens else longest,
            slots=view.slots,
            filler=row.filler,
            row_digest=digest,
            arrays=view.table,
            step_tokens=totals.tokens,
            step_loss_tokens=totals.loss_tokens,
        )
        return View(body, view.payload)

    framed = FramedStep(step, snapshot, frame, totals=totals, rows=rows)
    for key in _keys(contract, layout):
        framed.views_of(key)
    return framed


def _keys(contract: ResolvedContract, layout: ParallelLayout) -> set[ViewKey]:
    """Return the keys of all views that the coordinates of a layout get."""
    return {
        view_key(Coordinates(data, context, 0, stage), contract, layout)
        for data in range(layout.data)
        for context in range(layout.context)
        for stage in range(layout.pipeline)
    }


def _longest(rows: Sequence[Row]) -> list[int]:
    """Return the slots of each row's longest physical segment."""
    offsets = [row.cu_seqlens_padded for row in rows]
    firsts = list(accumulate(map(len, offsets), initial=0))
    ends = np.concatenate(offsets)
    # Between two rows it steps back to 0, which is never the longest.
    longest: list[int] = np.maximum.reduceat(ends[1:] - ends[:-1], firsts[:-1]).tolist()
    return longest
