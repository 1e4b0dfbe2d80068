"""Samples that a preview has seen drawn: their lengths, what is over length, how long pieces wait."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from packhorse_service.mixing.over_length import CUTS, OverLength
from packhorse_service.preview.plan_report import (
    OverLengthReport,
    Samples,
    Stop,
)
from packhorse_service.preview.planning_facts import PLANNED_AS, Planning
from packhorse_service.preview.statistics import (
    histogram,
    percentiles,
    policy_costs,
    ratio,
)

__all__ = ["DrawnSamples", "Waits"]

LARGE = 0.2  # of a step's slots, in one sample


class DrawnSamples:
    """Samples drawn so far, in order: a few integers of each, and what the policies over length make of them."""

    def __init__(self, planning: Planning) -> None:
        self.lengths: list[int] = []  # slots of each
        self.sources: list[int] = []  # of each
        sources = len(planning.sources)
        self.skipped = [0] * sources  # samples of each source with unusable content
        self.unsupervised = [0] * sources  # tokens of each source that its policy leaves out
        self.empty = 0  # samples without a slot, left out
        self.epochs = [0] * sources
        self.over_length = [0] * sources  # samples
        self.lost = [0] * sources  # their tokens that are not planned
        self._planning = planning
        self._longest = [(0, "")] * sources  # slots and place of each source's longest
        self._stop: Stop | None = None

    def drawn(self, source: int, epoch: int, slots: int, place: str) -> None:
        """Note a sample of so many slots; ``place`` names it for people."""
        self.lengths.append(slots)
        self.sources.append(source)
        self.epochs[source] = max(self.epochs[source], epoch + 1)
        self._longest[source] = max(self._longest[source], (slots, place))
        if self._planning.limit is not None and slots > self._planning.limit:
            self._note_over_length(source, slots, self._planning.limit, place)

    def _note_over_length(self, source: int, slots: int, limit: int, place: str) -> None:
        setting = self._planning.sources[source]
        cut = CUTS[PLANNED_AS[setting.over_length]]
        self.over_length[source] += 1
        self.lost[source] += slots - sum(end - begin for begin, end in cut(0, slots, limit, 0))
        stops = setting.over_length is OverLength.ERROR and self.over_length[source] > setting.skip_budget
        if stops and self._stop is None:
            self._stop = Stop(setting.setting, place, slots)

    def split_warnings(self) -> Iterator[str]:
        """Yield a warning for each source of which one sample, split, fills much of a step, piece behind piece."""
        contract = self._planning.contract
        row, step = contract.seq_length, contract.seq_length * contract.global_batch_size
        for source, (slots, place) in zip(self._planning.sources, self._longest, strict=True):
            split = self._planning.limit is None or source.over_length is OverLength.SPLIT
            if split and slots > max(row, LARGE * step):
                yield (
                    f"source {source.name!r}: {place} has {slots:,} slots, {slots / step:.1f} steps of {step:,}, and "
                    "its pieces follow one another: steps hold little else then. Raise global_batch_size, or cut such "
                    "documents into samples before"
                )

    def by_source(self) -> list[int]:
        """Return the number of samples of each source."""
        counts: list[int] = np.bincount(self.sources, minlength=len(self._planning.sources)).tolist()
        return counts

    def report(self) -> Samples:
        """Return the report of the lengths of all samples."""
        lengths = np.array(self.lengths, dtype=np.int64)
        return Samples(
            count=len(lengths),
            empty=self.empty,
            tokens=int(lengths.sum()),
            mean=ratio(int(lengths.sum()), len(lengths)),
            lengths=percentiles(self.lengths),
            histogram=histogram(lengths),
        )

    def over_length_report(self) -> OverLengthReport | None:
        """Return the report of the samples over length; ``None`` where none is cut at a length."""
        limit = self._planning.limit
        if limit is None:
            return None
        lengths = [slots for slots in self.lengths if slots > limit]
        return OverLengthReport(
            limit=limit,
            samples=len(lengths),
            tokens=sum(lengths),
            share=ratio(sum(lengths), sum(self.lengths)),
            stop=self._stop,
            policies=policy_costs(lengths, limit),
        )


@dataclass(slots=True)
class Waits:
    """Arrivals against departures, in pieces."""

    arrived: int = 0
    left: int = 0
    longest: int = 0
    most_late: int = 0
    _arrived_by: list[int] = field(default_factory=list)  # pieces, when each pack was closed

    def packed(self, numbers: Sequence[int]) -> None:
        """Note that the next pack holds these pieces, numbered as they arrived."""
        self._arrived_by.append(self.arrived)
        pack = len(self._arrived_by) - 1
        # A piece was there for the first pack that was closed after it arrived.
        self.longest = max(self.longest, pack - bisect_right(self._arrived_by, min(numbers)))
        for place, number in enumerate(numbers, start=self.left):
            self.most_late = max(self.most_late, place - number)
        self.left += len(numbers)
