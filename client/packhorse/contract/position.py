"""A position in a stream: (step, index) of a micro-batch, which is its sequence number."""

from __future__ import annotations

from typing import NamedTuple

from packhorse.schema import Whole

__all__ = ["ORIGIN", "Position"]


class Position(NamedTuple):
    """(step, index) of a micro-batch; the sequence number of the protocol."""

    step: Whole
    index: Whole  # type: ignore[assignment]  # tuple.index is shadowed on purpose

    def after(self, num_microbatches: int) -> Position:
        """The position of the next micro-batch of the same reader."""
        return Position(self.step, self.index + 1) if self.index + 1 < num_microbatches else Position(self.step + 1, 0)


ORIGIN = Position(0, 0)
