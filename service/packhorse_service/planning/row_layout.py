"""Where the segments of a row stand: its logical and physical offsets, and the padding between them.

*Logical* offsets count real slots alone, *physical* ones alignment and tail padding too. Both are int32 [E] and
start at 0; the last physical one is the row's width.

Shapes: S = segments that hold something; E = entries of an offset array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import ResolvedContract, TailPadding
from packhorse.errors import ContractError

__all__ = ["RowLayout", "boundaries", "lay_out", "row_offsets"]

Offsets = npt.NDArray[np.int32]


class RowLayout(NamedTuple):
    """Place of each segment in a row, and of its padding."""

    lengths: Sequence[int]  # [S] logical slots of each …
    gaps: Sequence[int]  # [S] … and the slots of padding behind it; empty where none has any
    tail: int  # slots of padding behind all of them
    logical: Offsets  # [E]
    physical: Offsets  # [E]


def lay_out(slots: Sequence[int], contract: ResolvedContract) -> RowLayout:
    """Lay out a row whose segments have these logical slots, as the contract fixes its shape.

    Raises ``ContractError`` where they do not fit: a pack that does not fit its row cannot be, and is better said
    than trained on.
    """
    return LAYOUTS[contract.packed](slots, contract)


def row_offsets(slots: Iterable[Sequence[int]], contract: ResolvedContract) -> list[tuple[Offsets, Offsets]]:
    """Return the (logical, physical) offsets of rows whose segments have these logical slots."""
    layouts = [lay_out(of_row, contract) for of_row in slots]
    return [(layout.logical, layout.physical) for layout in layouts]


def boundaries(counts: Iterable[int]) -> list[int]:
    """Return where each of the parts begins, and where the last ends."""
    return list(accumulate(counts, initial=0))


def _packed(slots: Sequence[int], contract: ResolvedContract) -> RowLayout:
    """Lay out aligned segments, then the tail, then entries up to a fixed number."""
    multiple, logical = contract.segment_multiple, boundaries(slots)
    gaps = [-length % multiple for length in slots] if multiple > 1 else []
    physical = boundaries(map(add, slots, gaps)) if gaps else logical.copy()
    used = physical[-1]
    width = contract.max_width if contract.pad_to_max_length else used + -used % contract.row_multiple
    if used > width:
        raise ContractError(f"segments of {used} slots do not fit a row of {width}; raise seq_length")
    if used < width and contract.tail_padding is TailPadding.OWN_SEGMENT:
        logical.append(logical[-1])
        physical.append(width)
    physical[-1] = width
    if contract.pad_cu_seqlens and contract.max_segments:
        _fix_count(logical, physical, len(slots), contract.max_segments)
    return RowLayout(slots, gaps, width - used, np.array(logical, np.int32), np.array(physical, np.int32))


def _fix_count(logical: list[int], physical: list[int], segments: int, max_segments: int) -> None:
    """Repeat the last entries of both, up to those of a row of ``max_segments`` and its tail."""
    if segments > max_segments:
        raise ContractError(f"a row of {segments} segments where max_segments={max_segments}; raise max_segments")
    missing = max_segments + 2 - len(logical)
    logical += logical[-1:] * missing
    physical += physical[-1:] * missing


def _dense(slots: Sequence[int], contract: ResolvedContract) -> RowLayout:
    """Lay out a row for each segment, and empty rows where the last micro-batch has too few."""
    rows, width = contract.micro_batch_size, contract.seq_length
    empty = rows - len(slots)
    gaps = [width - length for length in slots]
    logical, physical = boundaries([*slots, *[0] * empty]), range(0, width * rows + 1, width)
    return RowLayout(slots, gaps, width * empty, np.array(logical, np.int32), np.array(physical, np.int32))


LAYOUTS = {True: _packed, False: _dense}  # by whether the contract packs
