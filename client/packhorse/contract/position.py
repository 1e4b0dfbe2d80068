"""Position in a stream: (step, index) of a micro-batch, which is its sequence number."""

from __future__ import annotations

from typing import NamedTuple

from packhorse.schema import Whole

__all__ = ["ORIGIN", "Position"]


class Position(NamedTuple):
    """Place of a micro-batch in its stream; the sequence number of the protocol. Both count from 0."""

    step: Whole
    """Optimizer step of the stream."""
    index: Whole  # type: ignore[assignment]  # tuple.index is shadowed on purpose
    """Number of the micro-batch within the step, of one data-parallel rank."""

    def after(self, num_microbatches: int) -> Position:
        """Return the position of the next micro-batch of the same reader, of steps of ``num_microbatches``."""
        return Position(self.step, self.index + 1) if self.index + 1 < num_microbatches else Position(self.step + 1, 0)


ORIGIN = Position(0, 0)
