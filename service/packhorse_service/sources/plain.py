"""Plain files of a tar, found and checked all at once: what nearly every member of nearly every shard is.

``tar.read_members`` looks at one member after the other and knows every kind there is. Here a stretch of a
shard becomes columns instead: only the sizes are walked from header to header, all else is compared for
all headers together. A run of members ends at the first that is anything but a plain file as tar tools
write them, perhaps behind a PAX header that gives times and the like; whoever wants to know what is there
reads it with ``tar``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse_service.sources.tar import (
    BLOCK,
    KIND,
    NAME,
    PAX,
    PREFIX,
    SIZE,
    SPACES,
    ZEROS,
    pax_records,
    renames,
)

__all__ = ["PlainMembers", "plain_members"]

SPACE = ord(" ")
REGULAR = ord("0")

# The bytes of a header from its size to its kind, as rows of a table with a column for each header.
FIELDS = slice(SIZE.start, KIND + 1)
SIZE_DIGITS, SIZE_END = slice(0, 11), 11
SUM, SUM_DIGITS, SUM_END = slice(24, 32), slice(24, 30), 30
KIND_ROW = 32
WEIGHTS = 8 ** np.arange(10, -1, -1)  # of octal digits

# What webdataset's writer, which gives times as floats, has before every member: the time alone.
ONE_TIME = re.compile(rb"(\d\d) mtime=[^\n]*\n")

Bytes = npt.NDArray[np.uint8]


class PlainMembers(NamedTuple):
    """The n plain files at the front of a stretch, whole ones only. Offsets count from its first byte."""

    names: list[bytes]  # not decoded yet
    firsts: npt.NDArray[np.int64]  # [n] of the member's first header, a PAX header included
    starts: npt.NDArray[np.int64]  # [n] of its data
    sizes: npt.NDArray[np.int64]  # [n] bytes of data
    ended: bool  # the archive ends behind them


class _Headers(NamedTuple):
    """The h headers of a stretch, as far as their sizes lead."""

    places: npt.NDArray[np.int64]  # [h] in the stretch
    names: Bytes  # [h, 100]
    kinds: Bytes  # [h]
    sizes: npt.NDArray[np.int64]  # [h] of the data behind each
    usual: npt.NDArray[np.bool_]  # [h] checked, and written as nearly every tool writes it
    end: int  # of the last one's data


def plain_members(stretch: bytes, *, at_end: bool) -> PlainMembers:
    """Return the run of plain files with which ``stretch`` begins, at a header.

    ``at_end`` says that the shard has nothing behind the stretch.
    """
    headers = _headers(stretch)
    extending = headers.usual & (headers.kinds == PAX)
    extended = np.zeros_like(extending)  # those before which a PAX header stands
    extended[1:] = extending[:-1]
    good = np.where(extending, ~extended, headers.usual & (headers.kinds == REGULAR))
    good[extending] &= _say_nothing(stretch, headers.places[extending] + BLOCK, headers.sizes[extending])
    count = len(good) if good.all() else int(good.argmin())
    chosen = np.flatnonzero(~extending[:count])
    return PlainMembers(
        names=headers.names[chosen].view(f"S{NAME.stop}").ravel().tolist(),
        firsts=headers.places[chosen - extended[chosen]],
        starts=headers.places[chosen] + BLOCK,
        sizes=headers.sizes[chosen],
        ended=count == len(good) and not extending[-1:].any() and _archive_ends(stretch, headers.end, at_end),
    )


def _headers(stretch: bytes) -> _Headers:
    walked, end = _walk(stretch)
    places = np.array(walked, np.int64)
    headers = np.frombuffer(stretch, np.uint8, len(stretch) // BLOCK * BLOCK).reshape(-1, BLOCK)[places // BLOCK]
    fields = np.ascontiguousarray(headers[:, FIELDS].T)
    checksums = headers.sum(axis=1, dtype=np.uint32) - fields[SUM].sum(axis=0, dtype=np.uint32) + SPACES
    usual = (
        _are_octal(fields[SIZE_DIGITS])
        & ((fields[SIZE_END] == 0) | (fields[SIZE_END] == SPACE))
        & _are_octal(fields[SUM_DIGITS])
        & (fields[SUM_END] == 0)
        & (fields[SUM_END + 1] == SPACE)
        & (_octal(fields[SUM_DIGITS]) == checksums)
        & (headers[:, PREFIX.start] == 0)
    )
    return _Headers(
        places, np.ascontiguousarray(headers[:, NAME]), fields[KIND_ROW], _octal(fields[SIZE_DIGITS]), usual, end
    )


def _walk(stretch: bytes) -> tuple[list[int], int]:
    """Return where headers are whose data is whole, and where the last one's ends.

    A size is taken as it reads, and checked later; what reads as none ends the walk.
    """
    places, place = [], 0
    last = len(stretch) - BLOCK
    try:
        while place <= last:
            size = int(stretch[place + SIZE.start : place + SIZE.stop - 1], 8)
            if size < 0:
                break
            places.append(place)
            place += BLOCK + (size + BLOCK - 1 & -BLOCK)
    except ValueError:
        pass
    if place > len(stretch):
        place = places.pop()
    return places, place


def _are_octal(digits: Bytes) -> npt.NDArray[np.bool_]:
    """[d, h] → [h]"""
    return ((digits & 0xF8) == ord("0")).all(axis=0)


def _octal(digits: Bytes) -> npt.NDArray[np.int64]:
    """[d, h] → [h]"""
    return WEIGHTS[-len(digits) :] @ (digits & 7)


def _say_nothing(stretch: bytes, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[x] Tell of each PAX header's data whether the member behind it is read the same without it."""
    bodies = (stretch[start:end] for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    return np.fromiter(map(_says_nothing, bodies), np.bool_, len(starts))


def _says_nothing(pax_header: bytes) -> bool:
    match = ONE_TIME.fullmatch(pax_header)
    if match:
        return int(match[1]) == len(pax_header)
    records = pax_records(pax_header)
    return records is not None and not renames(records)


def _archive_ends(stretch: bytes, place: int, at_end: bool) -> bool:
    header = stretch[place : place + BLOCK]
    return header == ZEROS or (at_end and not header)
