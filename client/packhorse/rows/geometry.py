"""Geometry of a packed row: positions, segments and padding, from its two offset arrays.

Shapes: T = row width in slots, S = segments (an own-segment tail counts), L = segments of at least one real slot.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.rows.payload import narrowest

__all__ = ["Geometry"]


@lru_cache(maxsize=4)
def _counting(count: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return 0 … count-1, read-only, as narrow as they fit: most rows have one width."""
    numbers: npt.NDArray[np.unsignedinteger[Any]] = np.arange(count, dtype=narrowest(count))
    numbers.flags.writeable = False
    return numbers


class Geometry:
    """Positions, segments and padding of a row, computed once and only when asked for.

    ``cu_seqlens`` are its logical offsets, ``cu_seqlens_padded`` its physical ones: integers [S+1] from 0, the
    last physical one is T. They are not checked.
    """

    def __init__(self, cu_seqlens: npt.NDArray[Any], cu_seqlens_padded: npt.NDArray[Any]) -> None:
        logical, physical = cu_seqlens.astype(np.int64), cu_seqlens_padded.astype(np.int64)
        self.physical = physical
        self.starts = physical[:-1]
        self.lengths = logical[1:] - logical[:-1]
        self.padded_lengths = physical[1:] - self.starts
        self.ends = self.starts + self.lengths  # of the logical slots
        self.gaps = self.padded_lengths - self.lengths  # padding behind each segment
        self.width = int(physical[-1])

    @cached_property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """Position of each slot, [T]: restarts at 0 in each segment and continues through its padding."""
        return self.write_positions(np.empty(self.width, np.int64))

    def write_positions(self, out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Write ``position_ids`` into an array of [T]; worked out in narrow integers, of which many fit the cache."""
        slots = _counting(self.width)
        positions = self.starts.astype(slots.dtype).repeat(self.padded_lengths)
        np.subtract(slots, positions, out=positions)
        out[:] = positions
        return out

    @cached_property
    def segments(self) -> list[slice]:
        """Logical slots of each non-empty segment, [L]."""
        occupied = self.lengths > 0
        return list(map(slice, self.starts[occupied].tolist(), self.ends[occupied].tolist()))

    @property
    def padding(self) -> list[slice]:
        """Slots of each stretch of padding, in order."""
        (padded,) = self.gaps.nonzero()
        if not len(padded):
            return []
        begins = self.ends[padded]
        return list(map(slice, begins.tolist(), (begins + self.gaps[padded]).tolist()))

    @cached_property
    def real(self) -> npt.NDArray[np.bool_]:
        """Flag of each slot, [T]: True on logical slots, False on padding."""
        real = np.ones(self.width, np.bool_)
        for stretch in self.padding:
            real[stretch] = False
        return real

    @property
    def last_slots(self) -> npt.NDArray[np.int64]:
        """Slot of the last logical position of each non-empty segment, [L]."""
        return self.ends[self.lengths.nonzero()] - 1
