"""Plain files of a tar, found and checked all at once: what nearly every member of nearly every shard is.

``read_members`` looks at one member after the other and knows every kind there is. Here a buffer of a shard
becomes columns instead, compared for all headers together. A run of members ends at the first that
is anything but a plain file as tar tools write them, perhaps behind a PAX header that gives times and the
like; whoever wants to know what is there calls ``read_members``.

h = headers found in the buffer, n = members of the run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.rounding import ceil_div
from packhorse_service.sources.tar.reader import (
    BLOCK,
    KIND,
    NAME,
    NEWLINE,
    PAX,
    PREFIX,
    SIZE,
    SPACES,
    pax_records,
    renames,
)

__all__ = ["ScannedMembers", "scan_members"]

# Bytes 257 to 261 of a header, in the word that holds them.
SIGNATURE, SIGNATURE_WORD, SIGNATURE_BITS = int.from_bytes(b"ustar", "little") << 8, 32, (1 << 40) - 1 << 8
SPACE = ord(" ")
REGULAR = ord("0")

# The bytes of a header from its size to its kind, as rows of a table with a column for each header.
FIELDS = slice(SIZE.start, KIND + 1)
SIZE_DIGITS, SIZE_END = slice(0, 11), 11
SUM, SUM_DIGITS, SUM_END = slice(24, 32), slice(24, 30), 30
KIND_ROW = 32
WEIGHTS = 8 ** np.arange(10, -1, -1)  # of octal digits

# webdataset's writer gives times as floats, so that each member has a PAX header: "27 mtime=1700000000.123456\n"
TIME_KEY = np.frombuffer(b" mtime=", np.uint8)[:, None]

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]


class ScannedMembers(NamedTuple):
    """The n plain files at the front of a buffer, whole ones only. Offsets count from its first byte."""

    names: list[bytes]  # not decoded yet
    firsts: Integers  # [n] of the member's first header, a PAX header included
    starts: Integers  # [n] of its data
    sizes: Integers  # [n] bytes of data
    ended: bool  # the archive ends behind them


class _HeaderTable(NamedTuple):
    """Columns of all that looks like a header. Places count in blocks of 512 bytes."""

    places: Integers  # [h]
    names: Bytes  # [h, 100]
    kinds: Bytes  # [h]
    sizes: Integers  # [h] bytes of the data behind each
    nexts: Integers  # [h] where that data ends
    usual: Truths  # [h] is one, written as nearly every tool writes it, and its data is whole


def scan_members(buffer: bytes | memoryview, *, at_end: bool) -> ScannedMembers:
    """Return the run of plain files with which ``buffer`` begins, at a header.

    ``at_end`` says that the shard has nothing behind the buffer.
    """
    blocks = np.frombuffer(buffer, np.uint8, len(buffer) // BLOCK * BLOCK).reshape(-1, BLOCK)
    headers = _headers(blocks)
    extending = headers.usual & (headers.kinds == PAX) & (headers.sizes > 0)
    extended = np.append(False, extending)[:-1]  # a PAX header stands before these
    good = np.where(extending, ~extended, headers.usual & (headers.kinds == REGULAR))
    good[extending] &= _say_nothing(blocks, headers.places[extending] + 1, headers.sizes[extending])
    count = len(good) if good.all() else int(good.argmin())
    chosen = np.flatnonzero(~extending[:count])
    return ScannedMembers(
        names=headers.names[chosen].view(f"S{NAME.stop}").ravel().tolist(),
        firsts=headers.places[chosen - extended[chosen]] * BLOCK,
        starts=headers.places[chosen] * BLOCK + BLOCK,
        sizes=headers.sizes[chosen],
        ended=count > 0
        and not extending[count - 1]
        and _archive_ends(buffer, int(headers.nexts[count - 1]) * BLOCK, at_end),
    )


def _headers(blocks: Bytes) -> _HeaderTable:
    places = np.flatnonzero((blocks.view("<u8")[:, SIGNATURE_WORD] & SIGNATURE_BITS) == SIGNATURE)
    headers = blocks[places]
    fields = np.ascontiguousarray(headers[:, FIELDS].T)
    sizes = _octal(fields[SIZE_DIGITS])
    nexts = places + 1 + ceil_div(sizes, BLOCK)
    checksums = headers.sum(axis=1, dtype=np.uint32) - fields[SUM].sum(axis=0, dtype=np.uint32) + SPACES
    usual = (
        _are_octal(fields[SIZE_DIGITS])
        & ((fields[SIZE_END] == 0) | (fields[SIZE_END] == SPACE))
        & _are_octal(fields[SUM_DIGITS])
        & (fields[SUM_END] == 0)
        & (fields[SUM_END + 1] == SPACE)
        & (_octal(fields[SUM_DIGITS]) == checksums)
        & (headers[:, PREFIX.start] == 0)
        & (nexts <= len(blocks))
        # Data may look like a header too; a header is what stands where the data before it ends.
        & (places == np.append(0, nexts)[:-1])
    )
    return _HeaderTable(places, np.ascontiguousarray(headers[:, NAME]), fields[KIND_ROW], sizes, nexts, usual)


def _are_octal(digits: Bytes) -> Truths:
    """Return [h] whether all digits [d, h] of a header's field are octal."""
    octal: Truths = np.equal(digits & 0xF8, ord("0")).all(axis=0)
    return octal


def _octal(digits: Bytes) -> Integers:
    """Return the values [h] of octal digits [d, h]."""
    values: Integers = WEIGHTS[-len(digits) :] @ (digits & 7)
    return values


def _say_nothing(blocks: Bytes, places: Integers, sizes: Integers) -> Truths:
    """Return [x], of each PAX header's data, whether the member behind it is read the same without it."""
    if not len(places):
        return np.ones(0, np.bool_)
    nothing = _give_the_time(blocks[places], sizes)
    for index in np.flatnonzero(~nothing).tolist():
        start = int(places[index]) * BLOCK
        records = pax_records(blocks.reshape(-1)[start : start + int(sizes[index])].tobytes())
        nothing[index] = records is not None and not renames(records)
    return nothing


def _give_the_time(fronts: Bytes, sizes: Integers) -> Truths:
    """Return [x], of the first blocks [x, 512] of PAX headers' data, whether that is one record with the time."""
    text = np.ascontiguousarray(fronts[:, :9].T)
    digits = text[:2] - ord("0")
    said = 10 * digits[0] + digits[1]
    last = fronts[np.arange(len(sizes)), np.minimum(sizes, BLOCK) - 1]
    keyed = np.equal(text[2:], TIME_KEY).all(axis=0)
    one: Truths = (digits <= 9).all(axis=0) & (said == sizes) & keyed & (last == NEWLINE)
    return one


def _archive_ends(buffer: bytes | memoryview, place: int, at_end: bool) -> bool:
    """Return whether nothing but zeros is behind ``place``, which must all be in the buffer to be seen."""
    rest = np.frombuffer(buffer, np.uint8)[place:]
    return at_end and (len(rest) == 0 or (len(rest) >= BLOCK and not rest.any()))
