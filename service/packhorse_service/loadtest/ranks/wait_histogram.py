"""Durations, counted in bins that grow by one percent: quantiles of millions of them to one percent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["WaitHistogram", "bin_of", "upper_edge"]

GROWTH = math.log(1.01)
LEAST_S = 1e-5  # shorter is no wait: bin 0


def bin_of(seconds: float) -> int:
    """Return the bin that a duration falls into."""
    return 0 if seconds <= LEAST_S else 1 + int(math.log(seconds / LEAST_S) / GROWTH)


def upper_edge(number: int) -> float:
    """Seconds that no duration of the bin exceeds; 0 for those that are none."""
    return 0.0 if number == 0 else LEAST_S * math.exp(GROWTH * number)


@dataclass(slots=True)
class WaitHistogram:
    """Counts of the durations that fell into each bin, and the exact sum and maximum."""

    bins: Counter[int] = field(default_factory=Counter)
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.bins[bin_of(seconds)] += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)

    @staticmethod
    def merged(parts: Iterable[Mapping[int, int]], total_s: float = 0.0, max_s: float = 0.0) -> WaitHistogram:
        """Add the durations of several, with what is known of all of them."""
        merged = WaitHistogram(total_s=total_s, max_s=max_s)
        for part in parts:
            merged.bins.update(part)
        return merged

    def take_bins(self) -> Counter[int]:
        """Return the bins, and begin anew with none."""
        taken, self.bins = self.bins, Counter()
        return taken

    @property
    def count(self) -> int:
        return self.bins.total()

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the durations do not exceed, to one percent; 0 of none."""
        wanted = math.ceil(share * self.count)
        for number, below in self.cumulative():
            if below >= wanted:
                return min(upper_edge(number), self.max_s) if self.max_s else upper_edge(number)
        return 0.0

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """(bin, how many fell into it or a lower one), for every bin that has some."""
        below = 0
        for number in sorted(self.bins):
            below += self.bins[number]
            yield number, below
