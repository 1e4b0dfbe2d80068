"""Plan of a step: which data-parallel rank gets which of its packs, and where fillers go.

``serve``, ``plan`` and ``inspect`` plan by this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from packhorse.contract.batch_contract import Remainder
from packhorse_service.planning.balance import assign_to_ranks
from packhorse_service.planning.balance_window import AssignedStep, Pack, State

__all__ = ["PlannedStep", "plan_step"]


@dataclass(frozen=True, slots=True)
class PlannedStep(Generic[Pack]):
    """Step before its rows are built.

    Where a finite stream ends, ``micro_batches`` are too few; ``ranks`` then names numbers behind the last: fillers.
    """

    step: int
    micro_batches: Sequence[Pack]  # in the order of the pack stream
    costs: Sequence[int]  # of each
    loss_tokens: Sequence[int]  # slots of each that are trained on
    ranks: Sequence[Sequence[int]]  # ranks[rank][index]: which micro-batch
    snapshot: bytes  # of the stream behind this step

    @property
    def fillers(self) -> int:
        """Micro-batches that are missing, over all ranks."""
        return sum(map(len, self.ranks)) - len(self.micro_batches)


def plan_step(
    assigned: AssignedStep[Pack, State],
    loss_tokens: Sequence[int],
    *,
    packs: int,
    data_parallel: int,
    remainder: Remainder,
    snapshot: bytes = b"",
) -> PlannedStep[Pack] | None:
    """Plan a step of so many ``packs`` for so many ranks; ``loss_tokens`` are by pack.

    Missing packs become fillers, which cost as much as the last pack, or the step is dropped: ``None``.
    """
    missing = packs - len(assigned.packs)
    if missing and remainder is Remainder.DROP:
        return None
    costs = [*assigned.costs, *[assigned.costs[-1]] * missing]
    ranks = assign_to_ranks(costs, data_parallel, [*loss_tokens, *[None] * missing])
    return PlannedStep(assigned.step, assigned.packs, assigned.costs, loss_tokens, ranks, snapshot)
