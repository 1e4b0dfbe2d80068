"""One session for all model chunks of a virtual pipeline.

Megatron gives each model chunk of a rank an iterator of its own, and each goes at its own pace: the first
chunk reads a whole group before the last reads one. All of them yield the same micro-batches; one counts
as taken, and is acknowledged, when the slowest chunk has taken it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from packhorse.codec.microbatch import MicroBatch
from packhorse.feeding.hand_over import HandOver, Owed, given

__all__ = ["Chunks"]


class Pace(NamedTuple):
    """Micro-batches that a chunk was given, and the deque out of which it is given the next: empty once it was."""

    given: int = 0
    owed: Owed | None = None


class Chunks:
    """Paces of a rank's chunks."""

    def __init__(self, count: int, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._paces = [Pace()] * count

    def iterate(self, chunk: int) -> Iterator[MicroBatch]:
        """Return the iterator of one chunk, which ends where the feed's own iteration does."""
        return iter(given(partial(self._prepare, chunk)), None)

    def _prepare(self, chunk: int) -> Owed:
        """Return a deque whose first is the chunk's next; taken from the feed if no other chunk waits for it."""
        for other, pace in enumerate(self._paces):
            if pace.owed is not None and not pace.owed:
                self._paces[other] = Pace(pace.given + 1)
        count, owed = self._paces[chunk]
        if owed:  # an interrupt came before it was given
            return owed
        counts = [pace.given for pace in self._paces]
        ahead = count - min(counts)
        last = ahead == 0 and counts.count(count) == 1
        owed = self._hand_over.prepare() if last else deque((self._hand_over.peek(ahead),))
        self._paces[chunk] = Pace(count, owed)
        return owed
