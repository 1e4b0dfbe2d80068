"""Several arrays in one buffer: the payload frame of a micro-batch.

Each array starts at a multiple of 64 bytes, so that a reader can view it in place whatever its dtype.
The table that describes them travels in the header; a table that does not fit its buffer is refused
before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from packhorse.errors import ProtocolError
from packhorse.rounding import ceil_div, round_up
from packhorse.schema import Whole

__all__ = ["ArrayEntry", "join_arrays", "split_arrays"]

ALIGNMENT = 64
# Closed list, little-endian on the wire whatever the machine.
DTYPES = {name: np.dtype(name) for name in ("|u1", "<u2", "<u4", "<i4", "<i8")}

AnyArray = npt.NDArray[np.generic]


class ArrayEntry(Struct, frozen=True, gc=False):
    """Array of a payload: its name, dtype from ``DTYPES``, length in entries and offset in bytes."""

    name: str
    dtype: str
    length: Whole
    offset: Whole


def join_arrays(arrays: Mapping[str, AnyArray]) -> tuple[tuple[ArrayEntry, ...], bytearray]:
    """Copy one-dimensional arrays into one buffer; return its table and the buffer."""
    table, gaps = _table(tuple([(name, array.dtype, len(array)) for name, array in arrays.items()]))
    parts: list[Any] = []  # buffers, as arrays are, whatever a type checker knows of them
    for entry, gap, array in zip(table, gaps, arrays.values(), strict=True):
        parts += gap, array.astype(DTYPES[entry.dtype], "C", copy=False)
    return table, bytearray().join(parts)


@lru_cache(maxsize=1024)
def _table(
    arrays: tuple[tuple[str, np.dtype[np.generic], int], ...],
) -> tuple[tuple[ArrayEntry, ...], tuple[bytes, ...]]:
    """Return the table of arrays of (name, dtype, length), and the padding before each.

    It is remembered, as the rows of a stream have few shapes.
    """
    entries, gaps, end = [], [], 0
    for name, dtype, length in arrays:
        offset = round_up(end, ALIGNMENT)
        entries.append(ArrayEntry(name, dtype.newbyteorder("<").str, length, offset))
        gaps.append(bytes(offset - end))
        end = offset + length * dtype.itemsize
    return tuple(entries), tuple(gaps)


def split_arrays(entries: Iterable[ArrayEntry], buffer: memoryview) -> dict[str, AnyArray]:
    """Return views of the arrays that ``entries`` describe, in place, by name.

    Raises ``ProtocolError`` for an unknown dtype, a name given twice, or a table that overlaps, leaves
    its alignment or does not end where the buffer ends.
    """
    arrays: dict[str, AnyArray] = {}
    end = 0
    for entry in entries:
        # ``round_up`` written out: for each array of each micro-batch.
        dtype, aligned = DTYPES.get(entry.dtype), -(-end // ALIGNMENT) * ALIGNMENT
        if dtype is None or entry.name in arrays or entry.length < 0 or entry.offset != aligned:
            raise ProtocolError(
                f"payload table: {entry} has an unknown dtype, a name used twice, a negative length or a wrong offset"
            )
        end = entry.offset + entry.length * dtype.itemsize
        if end > len(buffer):
            raise ProtocolError(f"payload table: {entry} reaches beyond the payload of {len(buffer)} bytes")
        arrays[entry.name] = np.frombuffer(buffer, dtype, entry.length, entry.offset)
    if end != len(buffer):
        raise ProtocolError(f"payload of {len(buffer)} bytes where its table describes {end}")
    return arrays


def narrowest(vocab_size: int) -> np.dtype[np.generic]:
    """Return the type of ids on the wire: 16 bits where the vocabulary allows, else 32."""
    return DTYPES["<u2"] if vocab_size <= 1 << 16 else DTYPES["<u4"]


def bits(flags: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Return 0/1 values as bits, lowest first, [ceil(n / 8)]."""
    return np.packbits(np.asarray(flags, dtype=np.uint8), bitorder="little")


def from_bits(packed: AnyArray, count: int) -> npt.NDArray[np.uint8]:
    """Return ``count`` 0/1 values of their ``bits``; raise ``ProtocolError`` for another number of bytes."""
    if len(packed) != ceil_div(count, 8):
        raise ProtocolError(f"{len(packed)} bytes of bits where {count} were promised")
    return np.unpackbits(packed.view(np.uint8), count=count, bitorder="little")
