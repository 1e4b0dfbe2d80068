"""Integer arrays in ``.npy`` members, parsed without a Python object per value and never unpickled."""

from __future__ import annotations

import io
import re
from functools import lru_cache
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse_service.sources.sample import BadSample, content_of
from packhorse_service.sources.tar.columnar import Column
from packhorse_service.sources.tar.reader import BLOCK, TarMember

__all__ = ["JoinedArrays", "dump_array", "headers_of", "join_arrays", "load_array"]

MAGIC = b"\x93NUMPY"
MAGIC_BYTES = len(MAGIC) + 2  # and two bytes of version
HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

# What numpy's parser raises for bytes that are no header: it takes them for Python, first of today, then of long ago.
NOT_A_HEADER = (ValueError, LookupError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError)

SINGLE_BYTE = ("|b1", "|i1", "|u1")
WIDER = tuple(f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (2, 4, 8))
DTYPES = {code.encode(): np.dtype(code) for code in SINGLE_BYTE + WIDER}

# What numpy writes for one dimension of numbers. Its own parser goes through a syntax tree, which takes longer
# than everything else done to a short sample, so it is asked only where this does not match.
COMMON_HEADER_BYTES = 128
HEADERS_KEPT = 16384
COMMON_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?s:(..))"
    rb"\{'descr': '([<>][iu][248]|\|[iub]1)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n"
)


def load_array(member: TarMember) -> npt.NDArray[Any]:
    """Return the one-dimensional array [n] of numbers in ``member``, in the byte order it is stored in.

    Raises ``BadSample`` for anything else: another shape, objects, records, Fortran order, a wrong size.
    """
    data = content_of(member)
    count, dtype, start = _header(data, member)
    if len(data) - start != count * dtype.itemsize:
        raise BadSample(
            f"its header says {count} values of {dtype}, {count * dtype.itemsize} bytes, and {len(data) - start} "
            "follow; the array is cut, write it again",
            member,
        )
    return np.frombuffer(data, dtype, count, start)


class JoinedArrays(NamedTuple):
    """The arrays of n members, one after the other."""

    values: npt.NDArray[Any]  # [N] in the byte order they are stored in
    counts: npt.NDArray[np.int64]  # [n] values of each


def join_arrays(column: Column) -> JoinedArrays | None:
    """Join the arrays of a column; ``None`` unless ``load_array`` finds one in each member, all with like headers."""
    buffer, starts = column.buffer, column.starts
    first = _common_header(bytes(buffer[starts[0] : starts[0] + COMMON_HEADER_BYTES]))
    if first is None:
        return None
    _, dtype, begin = first
    counts, cut = np.divmod(column.sizes - begin, dtype.itemsize)
    if counts.min() < 0 or cut.any():
        return None
    blocks = np.frombuffer(buffer, np.uint8, len(buffer) // BLOCK * BLOCK).reshape(-1, BLOCK)
    headers = headers_of(dtype.str, begin)
    if blocks[starts // BLOCK, :begin].tobytes() != b"".join([headers[count] for count in counts.tolist()]):
        return None
    begins, ends = (starts + begin).tolist(), (starts + column.sizes).tolist()
    joined = b"".join([buffer[begin:end] for begin, end in zip(begins, ends, strict=True)])
    return JoinedArrays(np.frombuffer(joined, dtype), counts)


def dump_array(values: npt.NDArray[Any]) -> bytes:
    """Return ``values`` [n] as an ``.npy`` file."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _header(data: bytes, member: TarMember) -> tuple[int, np.dtype[Any], int]:
    """Return the count of values, their dtype and where they start."""
    common = _common_header(data[:COMMON_HEADER_BYTES])
    if common is not None:
        return common
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran_order, dtype = HEADER_READERS[version](stream)
    except NOT_A_HEADER as error:
        raise BadSample(
            "it is not an .npy file of numbers: it has no such header; write it with numpy.save", member
        ) from error
    if dtype.kind not in "iufb":
        raise BadSample(f"it holds {dtype} values, which are not read here; save a plain array of integers", member)
    if len(shape) != 1 or fortran_order:
        order = ", in Fortran order" if fortran_order else ""
        raise BadSample(f"its shape is {shape}{order}; ids must be one-dimensional, [n]", member)
    return shape[0], dtype, stream.tell()


class _CommonHeaders(dict[int, bytes]):
    """Common headers by their count of values: all else in them is the same. Most counts come again and again."""

    def __init__(self, dtype: str, size: int) -> None:
        """Make headers of ``size`` bytes each, for values of type ``dtype``."""
        self._dtype, self._size = dtype, size

    def __missing__(self, count: int) -> bytes:
        if len(self) == HEADERS_KEPT:
            self.clear()
        start = MAGIC + b"\x01\x00" + (self._size - MAGIC_BYTES - 2).to_bytes(2, "little")
        text = f"{{'descr': '{self._dtype}', 'fortran_order': False, 'shape': ({count},), }}"
        header = self[count] = (start + text.encode()).ljust(self._size - 1) + b"\n"
        return header


headers_of = lru_cache(maxsize=4)(_CommonHeaders)


def _common_header(data: bytes) -> tuple[int, np.dtype[Any], int] | None:
    match = COMMON_HEADER.match(data)
    if match is None or int.from_bytes(match[1], "little") != match.end() - MAGIC_BYTES - 2:
        return None
    return int(match[3]), DTYPES[match[2]], match.end()
