"""Packs to steps and ranks: balanced rows.

A *row* is the micro-batch of one index on every data-parallel rank: its packs are forwarded at the same
time, so they should cost the same. A step's packs are sorted by cost and cut into rows of one pack a rank;
rows are dealt in a snake, which evens the ranks' totals.

With a window of several steps, its packs are first dealt to those steps: sorted by cost, cut into strata,
and each step gets one run of neighbours from every stratum. So rows are more alike than one step alone
could make them, and each step still holds short and long packs alike. Which packs a step holds does not
depend on the layout; only which rank gets them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from packhorse_service.mixing.permutation import permutation, seed_of

__all__ = ["CostModel", "assign_to_ranks", "assign_to_steps"]

Supervised = Sequence[int | None]  # slots of each pack that are trained on; None for a filler

STRATA = 4  # runs of each step; rows are as even as they can be where a rank has that many micro-batches


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative cost of a segment of n slots: ``linear``·n + n², where ``linear`` is 6·h of a hidden size h.

    A layer multiplies each token with 12·h² weights, and with 2·h·n numbers of its segment's other tokens
    (scores and their weighted sum): 12·h²·n + 2·h·n², which is 2·h times the cost. Only the ratio matters. The
    default is a hidden size of 4,096; models with wider MLPs, experts or grouped heads differ a little.
    """

    linear: int = 6 * 4096

    def cost(self, lengths: Sequence[int]) -> int:
        """Cost of a pack with segments of these lengths, in slots."""
        squares: int = sum(map(mul, lengths, lengths))
        return self.linear * sum(lengths) + squares


def assign_to_steps(costs: Sequence[int], steps: int, seed: int) -> list[list[int]]:
    """Deal a window's packs, given by cost, to its steps: ``dealt[step]`` are the packs of that step, in order.

    ``len(costs)`` is a multiple of ``steps``. Which run of a stratum a step gets is drawn from ``seed`` and the
    costs, never from the steps' numbers: every pass over the same data is dealt alike.
    """
    if steps <= 1:
        return [list(range(len(costs)))] * steps
    by_cost = _by_cost(costs)
    per_step = len(costs) // steps
    dealt: list[list[int]] = [[] for _ in range(steps)]
    edges = [per_step * stratum // STRATA for stratum in range(STRATA + 1)]
    for stratum in range(STRATA):
        run = edges[stratum + 1] - edges[stratum]
        first = edges[stratum] * steps
        for step, place in enumerate(permutation(steps, seed_of(seed, stratum, *costs)).tolist()):
            start = first + place * run
            dealt[step] += by_cost[start : start + run]
    return [sorted(packs) for packs in dealt]


def assign_to_ranks(costs: Sequence[int], data_parallel: int, supervised: Supervised) -> list[list[int]]:
    """Deal a step's packs: ``plan[rank][index]`` is the pack of that micro-batch.

    ``costs`` and ``supervised`` (supervised slots) are by pack, their number a multiple of ``data_parallel``.
    Equal costs keep their order. No row is without supervised slots if swapping two packs can avoid it, but
    for a row of fillers alone.
    """
    by_cost = _by_cost(costs)
    rows = [by_cost[start : start + data_parallel] for start in range(0, len(costs), data_parallel)]
    _spread_supervision(rows, costs, supervised)
    snake = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [[row[rank] for row in snake] for rank in range(data_parallel)]


def _by_cost(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda pack: -costs[pack])


def _spread_supervision(rows: list[list[int]], costs: Sequence[int], supervised: Supervised) -> None:
    """Give each row without supervised slots a pack that has some, from the nearest row that can spare it."""
    if all(supervised):
        return
    trained = [sum(bool(supervised[pack]) for pack in row) for row in rows]
    for needy in range(len(rows)):
        if trained[needy] or all(supervised[pack] is None for pack in rows[needy]):
            continue
        donors = [row for row in range(len(rows)) if trained[row] > 1]
        if not donors:
            return
        donor = min(donors, key=lambda row: abs(row - needy))
        given = min(
            (pack for pack in rows[donor] if supervised[pack]),
            key=lambda pack: abs(costs[pack] - costs[rows[needy][0]]),
        )
        taken = min(rows[needy], key=lambda pack: abs(costs[pack] - costs[given]))
        rows[donor][rows[donor].index(given)] = taken
        rows[needy][rows[needy].index(taken)] = given
        trained[donor] -= 1
        trained[needy] += 1
        for row in (donor, needy):
            rows[row].sort(key=lambda pack: (-costs[pack], pack))
