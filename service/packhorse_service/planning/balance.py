"""Balance of packs over steps and data-parallel ranks.

A *wave* is the micro-batch of one index on every data-parallel rank: its packs are forwarded at the same
time, so they should cost the same. A step's packs are sorted by cost and cut into waves of one pack a rank;
waves are assigned in a snake, which evens the ranks' totals.

With a window of several steps, its packs are first assigned to those steps: sorted by cost, cut into strata,
and each step gets one run of neighbours from every stratum. So waves are more alike than one step alone
could make them, and each step still holds short and long packs alike. Which packs a step holds does not
depend on the layout; only which rank gets them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from packhorse_service.mixing.permutation import permutation, seed_of

__all__ = ["CostModel", "assign_to_ranks", "assign_to_steps"]

LossTokens = Sequence[int | None]  # slots of each pack that are trained on; None for a filler

STRATA = 4  # runs of each step; waves are as even as they can be where a rank has that many micro-batches


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative cost of a segment of n slots: ``linear``·n + n², where ``linear`` is 6·h of a hidden size h.

    A layer multiplies each token with 12·h² weights, and with 2·h·n numbers of its segment's other tokens
    (scores and their weighted sum): 12·h²·n + 2·h·n², which is 2·h times the cost. Only the ratio matters. The
    default is a hidden size of 4,096; models with wider MLPs, experts or grouped heads differ a little.
    """

    linear: int = 6 * 4096

    def cost(self, lengths: Sequence[int]) -> int:
        """Return the cost of a pack with segments of these lengths, in slots."""
        squares: int = sum(map(mul, lengths, lengths))
        return self.linear * sum(lengths) + squares


def assign_to_steps(costs: Sequence[int], steps: int, seed: int) -> list[list[int]]:
    """Assign a window's packs, given by cost, to its steps; return the packs of each step, in order.

    ``len(costs)`` is a multiple of ``steps``. Which run of a stratum a step gets is drawn from ``seed`` and the
    costs, never from the steps' numbers: every pass over the same data is assigned alike.
    """
    if steps <= 1:
        return [list(range(len(costs)))] * steps
    by_cost = _by_cost(costs)
    per_step = len(costs) // steps
    assigned: list[list[int]] = [[] for _ in range(steps)]
    edges = [per_step * stratum // STRATA for stratum in range(STRATA + 1)]
    for stratum in range(STRATA):
        run = edges[stratum + 1] - edges[stratum]
        first = edges[stratum] * steps
        for step, place in enumerate(permutation(steps, seed_of(seed, stratum, *costs)).tolist()):
            start = first + place * run
            assigned[step] += by_cost[start : start + run]
    return [sorted(packs) for packs in assigned]


def assign_to_ranks(costs: Sequence[int], data_parallel: int, loss_tokens: LossTokens) -> list[list[int]]:
    """Assign a step's packs: ``ranks[rank][index]`` of what is returned is the pack of that micro-batch.

    ``costs`` and ``loss_tokens`` are by pack, their number a multiple of ``data_parallel``. Equal costs keep their
    order. No wave is without loss tokens if swapping two packs can avoid it, but for a wave of fillers alone.
    """
    by_cost = _by_cost(costs)
    waves = [by_cost[start : start + data_parallel] for start in range(0, len(costs), data_parallel)]
    _spread_loss_tokens(waves, costs, loss_tokens)
    snake = [wave if number % 2 == 0 else wave[::-1] for number, wave in enumerate(waves)]
    return [[wave[rank] for wave in snake] for rank in range(data_parallel)]


def _by_cost(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=lambda pack: -costs[pack])


def _spread_loss_tokens(waves: list[list[int]], costs: Sequence[int], loss_tokens: LossTokens) -> None:
    """Give each wave without loss tokens a pack that has some, from the nearest wave that can spare it."""
    if all(loss_tokens):
        return
    training = [sum(bool(loss_tokens[pack]) for pack in wave) for wave in waves]
    for needy in range(len(waves)):
        if training[needy] or all(loss_tokens[pack] is None for pack in waves[needy]):
            continue
        donors = [wave for wave in range(len(waves)) if training[wave] > 1]
        if not donors:
            return
        donor = min(donors, key=lambda wave: abs(wave - needy))
        given = min(
            (pack for pack in waves[donor] if loss_tokens[pack]),
            key=lambda pack: abs(costs[pack] - costs[waves[needy][0]]),
        )
        taken = min(waves[needy], key=lambda pack: abs(costs[pack] - costs[given]))
        waves[donor][waves[donor].index(given)] = taken
        waves[needy][waves[needy].index(taken)] = given
        training[donor] -= 1
        training[needy] += 1
        for wave in (donor, needy):
            waves[wave].sort(key=lambda pack: (-costs[pack], pack))
