"""How the figures of a report are computed.

Shapes: D = data-parallel ranks, M = micro-batches of a rank in a step, S = steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from packhorse_service.mixing.over_length import CUTS, OverLength
from packhorse_service.preview.plan_report import BeforeAfter, LengthBin, MeanWorst, Percentiles, PolicyCost

__all__ = [
    "Floats",
    "Ints",
    "before_after",
    "histogram",
    "percentiles",
    "policy_costs",
    "quotients",
    "ratio",
    "relative",
    "rounded",
    "synchronous",
    "totals",
]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BINS_AN_OCTAVE = 4


def policy_costs(lengths: Sequence[int], limit: int) -> Mapping[str, PolicyCost]:
    """Return what each policy makes of these lengths, all over ``limit``.

    ``error`` makes nothing of them: it stops.
    """
    costs: dict[str, PolicyCost] = {}
    for policy, cut in CUTS.items():
        if policy is OverLength.ERROR:
            continue
        kept = [[b - a for a, b in cut(0, slots, limit, 0)] for slots in lengths]
        extra = sum(max(len(pieces) - 1, 0) for pieces in kept)
        costs[str(policy)] = PolicyCost(len(lengths), sum(lengths) - sum(map(sum, kept)), extra)
    return costs


def percentiles(values: Sequence[int]) -> Percentiles:
    """Return the percentiles of at least one value."""
    p50, p99 = np.percentile(np.array(values, dtype=np.int64), [50, 99], method="inverted_cdf").tolist()
    return Percentiles(p50, p99, max(values))


def ratio(part: int, whole: int) -> float:
    """Return a ratio to six digits; 0 of nothing."""
    return round(float(Fraction(part, whole)), 6) if whole else 0.0


def quotients(parts: npt.ArrayLike, wholes: npt.ArrayLike, *, of_nothing: float) -> Floats:
    """Return ``parts`` ÷ ``wholes``, broadcast; ``of_nothing`` where a whole is 0."""
    dividends, divisors = np.broadcast_arrays(np.asarray(parts, np.float64), np.asarray(wholes, np.float64))
    quotients = np.full(dividends.shape, of_nothing)
    found: Floats = np.divide(dividends, divisors, out=quotients, where=divisors != 0)
    return found


def synchronous(costs: Floats) -> Floats:
    """Return of each step Σ over micro-batches of the dearest rank ÷ mean of the ranks' totals.

    ``costs`` is [S, D, M]. Ranks that have nothing to do are even: 1.
    """
    return quotients(costs.max(axis=1).sum(axis=1), costs.sum(axis=2).mean(axis=1), of_nothing=1.0)


def totals(costs: Floats) -> Floats:
    """Return of each step, [S, D, M], the dearest rank's total ÷ the mean; 1 where nobody has anything to do."""
    totals = costs.sum(axis=2)
    return quotients(totals.max(axis=1), totals.mean(axis=1), of_nothing=1.0)


def before_after(before: Floats, after: Floats, steps: Sequence[int]) -> BeforeAfter:
    """Figures of all steps, [S] each, over these steps."""
    mean_worst = [MeanWorst(*rounded([of[steps].mean(), of[steps].max()])) for of in (before, after)]
    return BeforeAfter(*mean_worst)


def relative(costs: Floats) -> tuple[float, ...]:
    """Return of one step, [D, M], each rank's total ÷ their mean; 1 where nobody has anything to do."""
    totals = costs.sum(axis=1)
    return rounded(quotients(totals, totals.mean(), of_nothing=1.0))


def rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Return a value rounded to six digits."""
    return tuple(round(float(value), 6) for value in values)


def histogram(lengths: Ints) -> tuple[LengthBin, ...]:
    """Count lengths in a few bins for each doubling, from the shortest to the longest."""
    top = BINS_AN_OCTAVE * (int(lengths.max()).bit_length() + 1)
    edges = sorted({round(2 ** (step / BINS_AN_OCTAVE)) for step in range(top + 1)})
    samples, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    bins = [
        LengthBin(low, high - 1, int(count), int(total))
        for low, high, count, total in zip(edges, edges[1:], samples, tokens, strict=False)
    ]
    filled = [i for i, each in enumerate(bins) if each.samples]
    return tuple(bins[filled[0] : filled[-1] + 1])
