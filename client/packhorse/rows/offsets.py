"""Offsets of packed rows: laying them out, fixing their number, checking and merging them.

*Logical* offsets count real slots only; *physical* offsets count alignment and tail padding too. Both are
int32 [S+1] for S segments and start at 0. These functions take whole rows and work on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import TailPadding
from packhorse.errors import ContractError
from packhorse.rows.row import Geometry

__all__ = ["align", "check_physical", "fix_count", "longest", "merge_rows", "one_row", "pad_to_width", "padding_mask"]

Offsets = npt.NDArray[np.int32]


def align(lengths: npt.ArrayLike, multiple: int) -> tuple[Offsets, Offsets]:
    """(logical, physical) of segments of these logical lengths, each padded to a multiple.

    >>> [offsets.tolist() for offsets in align([3, 5], 4)]
    [[0, 3, 8], [0, 4, 12]]
    """
    slots = np.asarray(lengths, dtype=np.int64)
    return _cumulated(slots), _cumulated(-(-slots // multiple) * multiple)


def _cumulated(lengths: npt.NDArray[np.int64]) -> Offsets:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def pad_to_width(logical: Offsets, physical: Offsets, width: int, tail: TailPadding) -> tuple[Offsets, Offsets]:
    """Both offsets of the same segments in a row of ``width`` slots.

    The tail becomes a segment of its own, of logical length 0, or the last segment grows. Raises
    ``ContractError`` where the segments do not fit.

    >>> [o.tolist() for o in pad_to_width(*align([3, 5], 4), 16, TailPadding.OWN_SEGMENT)]
    [[0, 3, 8, 8], [0, 4, 12, 16]]
    """
    end = int(physical[-1])
    if end > width:
        raise ContractError(f"segments of {end} slots do not fit a row of {width}; raise seq_length to {end} or more")
    if end == width:
        return logical, physical
    if tail is TailPadding.OWN_SEGMENT:
        return np.append(logical, logical[-1]), np.append(physical, np.int32(width))
    return logical, np.append(physical[:-1], np.int32(width))


def fix_count(logical: Offsets, physical: Offsets, max_segments: int, width: int) -> tuple[Offsets, Offsets]:
    """Both offsets with exactly ``max_segments`` + 2 entries: the 0, the segments, and a tail.

    What is missing is filled with segments of length 0: physical with the row's width, logical with its last
    value. Raises ``ContractError`` where there are more entries already.
    """
    entries = max_segments + 2
    if len(physical) > entries:
        raise ContractError(
            f"a row of {len(physical) - 1} segments, its tail among them, where max_segments={max_segments} "
            f"allows {entries - 1}; raise max_segments"
        )
    missing = entries - len(physical)
    return np.append(logical, np.full(missing, logical[-1])), np.append(physical, np.full(missing, width, np.int32))


def longest(physical: Offsets) -> int:
    """Slots of the longest physical segment: ``max_seqlen`` where the contract does not fix it."""
    return int(np.diff(physical).max())


def padding_mask(logical: npt.ArrayLike, physical: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """bool [T], True on padding: alignment padding of each segment, and the tail."""
    return ~Geometry(np.asarray(logical), np.asarray(physical)).real


def one_row(offsets: Any) -> Any:
    """``offsets`` of one row as one dimension: [1, n] is squeezed, several rows are refused.

    A numpy array or a torch tensor, and the same is returned. Raises ``ContractError`` (``THD_ROWS``): the
    offsets of a second row would be read as going on in the first.
    """
    rows = math.prod(offsets.shape[:-1])
    if rows != 1:
        raise ContractError(
            f"THD_ROWS: offsets of {rows} rows; packed THD micro-batches expect micro-batch size 1: "
            "set micro_batch_size to 1, or merge the rows (packhorse.rows.offsets.merge_rows)"
        )
    return offsets.reshape(-1)


def check_physical(offsets: npt.NDArray[Any], width: int) -> Offsets:
    """Physical offsets as THD kernels take them: int32 [S+1], from 0 to the row's ``width``, never falling.

    [1, S+1] is squeezed. Raises ``ContractError`` that says what is wrong: the kernels would read or drop
    slots of other segments without a word.
    """
    row: npt.NDArray[Any] = one_row(offsets)
    if row.dtype != np.int32:
        raise ContractError(f"offsets are {row.dtype}; kernels read int32")
    if len(row) < 2 or row[0] != 0:
        raise ContractError(f"offsets must start at 0 and name at least one segment, got {row[:8].tolist()}")
    if np.any(np.diff(row) < 0):
        raise ContractError(f"offsets fall: {row.tolist()[:8]}; trim the -1 sentinels of a legacy batch first")
    if width < 1 or row[-1] != width:
        raise ContractError(f"offsets end at {row[-1]} in a row of {width} slots; they must end where the row does")
    return row


def merge_rows(rows: Sequence[npt.ArrayLike], seq_length: int) -> Offsets:
    """Offsets of several rows of ``seq_length`` slots as those of one row of all their slots.

    What a row repeats behind its end is left out.

    >>> merge_rows([[0, 8, 8], [0, 4, 8]], 8).tolist()
    [0, 8, 12, 16]
    """
    parts = [np.zeros(1, np.int32)]
    for i, row in enumerate(rows):
        offsets = np.asarray(row)
        ends = np.flatnonzero(offsets == seq_length)
        if not len(ends):
            raise ContractError(
                f"row {i} has offsets {offsets.tolist()[:8]}, which do not reach its {seq_length} slots"
            )
        parts.append((offsets[1 : ends[0] + 1] + i * seq_length).astype(np.int32))
    return np.concatenate(parts)
