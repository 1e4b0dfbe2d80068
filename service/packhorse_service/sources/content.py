"""What shards hold, told by digests: two shards that swap names keep their sizes, and so does ``tar --append``.

A small source is read whole. Of a large one each shard gives its beginning, its middle and its end, and of very many
shards the end alone: one read of each, as much as it takes to ask for its size. The end holds the last samples, and
all that can be appended into a tar's padding. What lies between is compared when it is read: ``mixing`` keeps a
checksum of the blocks that a snapshot refers to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import BinaryIO

from packhorse.errors import SourceError
from packhorse_service.sources.shards import Shard, open_shard
from packhorse_service.text.formatting import names

__all__ = ["ChangeWatch", "same_content", "with_content"]

DIGEST_BYTES = 16
WHOLE_BYTES = 64 << 20  # of a source: up to here every byte of it is read
MANY_SHARDS = 4096  # from here on one piece of each
PIECE_BYTES = 16 << 10  # more than the 10 KiB to which tar pads an archive
CHUNK_BYTES = 1 << 20

Range = tuple[int, int]  # of bytes, begin and end


def with_content(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Return the shards of a source with the digests of what they hold, and when they were written last.

    Those that lie elsewhere than in files are returned as they are: to read them costs requests. Raises ``SourceError``
    where one cannot be read.
    """
    whole = sum(shard.size for shard in shards) <= WHOLE_BYTES
    return tuple(_with_content(shard, _ranges(shard.size, len(shards), whole=whole)) for shard in shards)


def same_content(sources: Mapping[str, Sequence[Shard]]) -> Iterator[str]:
    """Yield a warning for each content that several shards hold, of one source or of several."""
    known: dict[tuple[int, bytes], list[str]] = {}
    for source, shards in sources.items():
        for shard in shards:
            if shard.digest:
                known.setdefault((shard.size, shard.digest), []).append(f"{shard.name!r} of source {source!r}")
    for alike in known.values():
        if alike[1:]:
            yield (
                f"the shards {names(alike)} hold the same, as far as it was compared: their samples come several times "
                "in an epoch; list one of them, or raise the source's weight instead"
            )


def _ranges(size: int, shards: int, *, whole: bool) -> tuple[Range, ...]:
    """Return which bytes of a shard are compared."""
    if whole or size <= 3 * PIECE_BYTES:
        return ((0, size),)
    begins = (size - PIECE_BYTES,) if shards >= MANY_SHARDS else (0, (size - PIECE_BYTES) // 2, size - PIECE_BYTES)
    return tuple((begin, begin + PIECE_BYTES) for begin in begins)


def _with_content(shard: Shard, compared: tuple[Range, ...]) -> Shard:
    if not shard.is_file:
        return shard
    try:
        with open_shard(shard) as stream:
            written_ns = os.fstat(stream.fileno()).st_mtime_ns  # first: what is written meanwhile shows later
            return replace(shard, digest=_digest(stream, compared), compared=compared, written_ns=written_ns)
    except OSError as error:
        raise SourceError(f"shard {shard.name!r}: {shard.url!r} cannot be read: {error}") from error


def _digest(stream: BinaryIO, compared: Sequence[Range]) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for begin, end in compared:
        stream.seek(begin)
        left = end - begin
        while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


class ChangeWatch:
    """Notices that a shard was written to since the stream was described, whenever it is opened."""

    def __init__(self) -> None:
        self._written_ns: dict[str, int] = {}  # by URL: when it was written last with its content as it was

    def check(self, stream: BinaryIO, shard: Shard) -> None:
        """Raise ``SourceError`` where an open shard has changed. It is left at its beginning or where it was."""
        if not shard.digest:
            return
        status = os.fstat(stream.fileno())
        if status.st_mtime_ns == self._written_ns.get(shard.url, shard.written_ns) and status.st_size == shard.size:
            return
        if status.st_size != shard.size or _digest(stream, shard.compared) != shard.digest:
            raise SourceError(
                f"shard {shard.name!r}: {shard.url!r} was written to since this server started, and holds something "
                "else now; put back what was there, or start the server again, which compares it with the checkpoint"
            )
        stream.seek(0)
        self._written_ns[shard.url] = status.st_mtime_ns
