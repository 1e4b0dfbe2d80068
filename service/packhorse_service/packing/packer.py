"""The packers by name, and the plan of one from a contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.errors import ConfigError
from packhorse_service.packing.decreasing import DecreasingPacker
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingAlgorithm, PackingPlan

__all__ = ["DEFAULT_LOOKAHEAD", "LookaheadPacker", "packer_for", "packing_plan"]

DEFAULT_LOOKAHEAD = 64  # packs' worth


class LookaheadPacker(Protocol):
    """Packer of a lookahead: samples in, packs out. What is pending, in arrival order, and ``closed`` are its state.

    A packer that packs one lookahead after the other, each as a whole, closes it before it gives the first pack of it,
    and takes no sample until the last is given. One that takes samples between any two packs is never closed.
    """

    plan: PackingPlan
    units: int  # pending

    def __len__(self) -> int:
        """Return the number of pending samples."""

    @property
    def wants_more(self) -> bool:
        """True where a sample must be added, if there is one, before the next pack is asked for."""

    @property
    def closed(self) -> bool:
        """True while packs of a lookahead are left, so that no sample may be added."""

    def add(self, sample: int, units: int, /) -> None:
        """Add a sample that arrives; samples are numbered in arrival order."""

    def add_all(self, samples: Sequence[int], sizes: Sequence[int], /) -> None:
        """Add samples that arrive, each with its units."""

    def close(self) -> None:
        """Stand as after a pack of a closed lookahead: what is pending is the rest of it."""

    def pending(self) -> Iterator[tuple[int, int]]:
        """(sample, units) in arrival order."""

    def next_pack(self) -> list[int]:
        """Return the samples of the next pack. Needs a pending sample."""


PACKERS: dict[PackingAlgorithm, Callable[[PackingPlan], LookaheadPacker]] = {
    PackingAlgorithm.FIFO_EXACT_TAIL: FifoExactTailPacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: DecreasingPacker,
    PackingAlgorithm.BEST_FIT_DECREASING: DecreasingPacker,
}


def packer_for(plan: PackingPlan) -> LookaheadPacker:
    """Return the packer of a plan's algorithm."""
    return PACKERS[plan.algorithm](plan)


def packing_plan(
    contract: ResolvedContract,
    lookahead: int | None = None,
    tail_slots: int = 0,
    algorithm: PackingAlgorithm = PackingAlgorithm.FIFO_EXACT_TAIL,
) -> PackingPlan:
    """Describe how packs of a contract are filled; ``lookahead`` in packs' worth."""
    capacity = (contract.seq_length - tail_slots) // contract.segment_multiple
    if capacity < 1:
        raise ConfigError(f"packing.tail_slots={tail_slots} leaves no room in rows of seq_length slots")
    packs = lookahead or min(DEFAULT_LOOKAHEAD, contract.global_batch_size)
    return PackingPlan(
        capacity=capacity, lookahead=packs * capacity, max_segments=contract.max_segments, algorithm=algorithm
    )
