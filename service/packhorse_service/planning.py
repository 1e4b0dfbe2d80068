"""Packs to ranks: balanced rows.

A step's packs are sorted by cost and cut into rows of one pack a data-parallel rank: the packs of a row
are forwarded at the same time, so they should cost the same. Rows are dealt in a snake, which evens the
ranks' totals. Only this stage knows the layout; the packs and their order do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["CostModel", "plan_step"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative cost of a segment of n slots: ``linear``·n + n², from 12·h² and 2·h·n FLOPs a token and layer.

    ``linear`` = 6·h; the default is that of a hidden size of 4,096.
    """

    linear: int = 6 * 4096

    def cost(self, lengths: npt.ArrayLike) -> int:
        """Cost of a pack with segments of these lengths, in slots."""
        n = np.asarray(lengths, dtype=np.int64)
        return int((n * (self.linear + n)).sum())


def plan_step(costs: Sequence[int], data_parallel: int) -> list[list[int]]:
    """Deal a step's packs, given by cost: ``plan[rank][index]`` is the pack of that micro-batch.

    ``len(costs)`` is a multiple of ``data_parallel``. Equal costs keep their order.
    """
    by_cost = sorted(range(len(costs)), key=lambda pack: -costs[pack])
    rows = [by_cost[start : start + data_parallel] for start in range(0, len(costs), data_parallel)]
    snake = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(rows)]
    return [[row[rank] for row in snake] for rank in range(data_parallel)]
