"""One session for all model chunks of a virtual pipeline.

Megatron gives each model chunk of a rank an iterator of its own, and each goes at its own pace: the first
chunk reads a whole group before the last reads one. All of them yield the same micro-batches; one counts
as taken, and is acknowledged, when the slowest chunk has taken it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from packhorse.codec.microbatch import MicroBatch

__all__ = ["Chunk", "Chunks"]

# (how many micro-batches behind the next one, whether it is taken) -> the micro-batch, None behind the end
Look = Callable[[int, bool], MicroBatch | None]


class Chunks:
    """Paces of a rank's chunks."""

    def __init__(self, count: int, look: Look) -> None:
        self._look = look
        self._taken = [0] * count

    def next(self, chunk: int) -> MicroBatch | None:
        """Return the chunk's next micro-batch; it is taken from the feed if no other chunk waits for it."""
        slowest = min(self._taken)
        ahead = self._taken[chunk] - slowest
        last = ahead == 0 and self._taken.count(slowest) == 1
        micro_batch = self._look(ahead, last)
        self._taken[chunk] += 1
        return micro_batch


class Chunk(Iterator[MicroBatch]):
    """The iterator of one model chunk."""

    def __init__(self, chunks: Chunks, number: int) -> None:
        self._chunks = chunks
        self._number = number
        self._ended = False

    def __next__(self) -> MicroBatch:
        micro_batch = None if self._ended else self._chunks.next(self._number)
        if micro_batch is None:
            self._ended = True
            raise StopIteration
        return micro_batch
