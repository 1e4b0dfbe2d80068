"""How packs are filled: the algorithm, the capacity of a pack and the lookahead, described."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["PackingAlgorithm", "PackingPlan"]


class PackingAlgorithm(StrEnum):
    """Algorithm by which packs are made of a lookahead."""

    FIFO_EXACT_TAIL = "fifo_exact_tail"
    FIRST_FIT_DECREASING = "first_fit_decreasing"  # of one lookahead after the other, as are best-fit's
    BEST_FIT_DECREASING = "best_fit_decreasing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """``capacity`` and ``lookahead`` in units; ``max_segments`` samples a pack, ``None`` for no limit."""

    capacity: int
    lookahead: int
    max_segments: int | None = None
    algorithm: PackingAlgorithm = PackingAlgorithm.FIFO_EXACT_TAIL

    @property
    def segments_limit(self) -> int:
        """Samples that a pack can hold at most."""
        return self.capacity if self.max_segments is None else self.max_segments

    def capacity_slots(self, segment_multiple: int) -> int:
        """Return the slots that the samples of a pack can take: ``capacity`` units of ``segment_multiple`` slots.

        The multiple is the contract's. It is no field here: all fields of a plan are in the fingerprint of a stream,
        where the contract stands beside it.
        """
        return self.capacity * segment_multiple
