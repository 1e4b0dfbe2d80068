"""The samples of a block where all of them have the same members: columns of data instead of samples.

So nearly every block of a pre-tokenised shard is, and where it is, nothing has to be done sample by
sample. ``read_columnar`` finds what ``read_members`` and ``group_samples`` would find, or gives ``None``
wherever those might find anything else, an error included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse_service.sources.tar.grouping import split_name
from packhorse_service.sources.tar.reader import BLOCK, text_of
from packhorse_service.sources.tar.scan import ScannedMembers, scan_members

__all__ = ["Column", "ColumnarSamples", "ReusableBuffer", "read_columnar"]

# The sample behind a block is read too, to know that it is one. Where it reaches further than this, samples are so
# large that what is done for each of them hardly counts.
AHEAD_BYTES = 64 * 1024


class ReusableBuffer:
    """Memory that is read into, again and again: fresh memory from the system costs more than to read into it.

    What was made of one block must not look at it any more when the next is read.
    """

    def __init__(self) -> None:
        self._memory = bytearray()

    def read(self, stream: BinaryIO, size: int) -> memoryview:
        """Read the next ``size`` bytes of a buffered stream; fewer at its end."""
        if len(self._memory) < size:
            self._memory = bytearray(size)
        buffer = memoryview(self._memory)[:size]
        return buffer[: stream.readinto(buffer)]  # type: ignore[attr-defined]


class Column(NamedTuple):
    """The members with one extension, one of each of the n samples of a block."""

    buffer: memoryview  # of the shard
    starts: npt.NDArray[np.int64]  # [n] where in the buffer a member's data begins: a multiple of 512
    sizes: npt.NDArray[np.int64]  # [n] bytes


class ColumnarSamples(NamedTuple):
    """The n samples of a block, all with the same members, as a column for each member."""

    keys: list[str]
    columns: Mapping[str, Column]  # by extension
    next_offset: int | None  # of the following sample's first header; None where the shard ends


def read_columnar(stream: BinaryIO, offset: int, block_bytes: int, memory: ReusableBuffer) -> ColumnarSamples | None:
    """Return the samples of ``stream`` from ``offset`` on: the last is the one with which ``block_bytes`` are reached.

    Their data lies in ``memory`` until it is read into again. ``None`` where their members differ, or where there is
    more than plain files and metadata about them.
    """
    if offset < 0 or offset % BLOCK:
        return None
    stream.seek(offset)
    wanted = block_bytes + AHEAD_BYTES
    buffer = memory.read(stream, wanted)
    members = scan_members(buffer, at_end=len(buffer) < wanted)
    extensions = _extensions(members.names)
    each = len(extensions)
    count = _samples_in(members, each, block_bytes)
    keys = _keys(members.names, extensions, count)
    if not keys:
        return None
    behind = count * each
    columns = {
        extension: Column(buffer, members.starts[number:behind:each], members.sizes[number:behind:each])
        for number, extension in enumerate(extensions)
    }
    follows = behind < len(members.names)
    return ColumnarSamples(keys, columns, offset + int(members.firsts[behind]) if follows else None)


def _extensions(names: Sequence[bytes]) -> list[str]:
    """Return the extensions of the first sample; none where it is no sample."""
    extensions: list[str] = []
    key = ""
    for name in map(text_of, names):
        prefix, extension = split_name(name)
        if extensions and prefix != key:
            break
        if not prefix or extension in extensions:
            return []
        key = prefix
        extensions.append(extension)
    return extensions


def _samples_in(members: ScannedMembers, each: int, block_bytes: int) -> int:
    """Return how many samples of ``each`` members the block has; 0 where its end is not among the members."""
    if not each:
        return 0
    firsts = members.firsts[::each]
    reached = int(np.searchsorted(firsts, block_bytes))
    if reached < len(firsts):
        return reached
    return len(firsts) if members.ended and len(members.names) % each == 0 else 0


def _keys(names: Sequence[bytes], extensions: Sequence[str], count: int) -> list[str]:
    """Return the keys of ``count`` samples; none where a member of theirs, or the one behind, is not as expected."""
    each = len(extensions)
    columns = [
        _keys_of(names[number : count * each + 1 : each], extension) for number, extension in enumerate(extensions)
    ]
    if not count or not all(columns):
        return []
    keys, behind = columns[0][:count], columns[0][count:]
    if len(set(keys)) < count or behind == keys[-1:] or any(column != keys for column in columns[1:]):
        return []
    return keys


def _keys_of(names: Sequence[bytes], extension: str) -> list[str]:
    """Return the keys that ``split_name`` finds in ``names``; none where one might not be ``KEY.extension``."""
    text = text_of(b"\0".join([*names, b""]))
    end = f".{extension}\0"
    keys = text.split(end)
    if keys.pop() or not names or not len(keys) == len(names) == text.count("\0") or not all(keys):
        return []
    if "\n" in text or text.startswith("__") or "\0__" in text:  # perhaps webdataset's own, which are no samples
        return []
    # A key has no dot, but for those of a folder that all have in common, as in `./000.npy`.
    folder = keys[0][: keys[0].rfind("/") + 1] if "." in keys[0] else ""
    if folder and (folder in keys or not all(key.startswith(folder) for key in keys)):
        return []
    return keys if text.count(".") == len(keys) * (end.count(".") + folder.count(".")) else []
