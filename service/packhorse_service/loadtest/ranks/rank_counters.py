"""Counts of what one rank took while it was measured, and how long it waited for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from packhorse.contract.position import Position
from packhorse.wire.messages import Wait
from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram

__all__ = ["MeasureWindow", "RankCounters", "RebuiltMicroBatch"]


@dataclass(frozen=True, slots=True)
class MeasureWindow:
    """Time that counts, from ``begin_s`` until ``end_s``; ranks that shall stop do from ``stop_s`` until ``resume_s``.

    In seconds of the monotonic clock. Nothing counts, and nobody stops, before the coordinator has set it.
    """

    begin_s: float = inf
    end_s: float = inf
    stop_s: float = inf
    resume_s: float = inf

    def counts(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s

    def stopped(self, at_s: float) -> bool:
        return self.stop_s <= at_s < self.resume_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltMicroBatch:
    """Facts kept of a micro-batch once it was rebuilt: a rank that trains holds its tensors, this one need not."""

    position: Position
    row_digest: bytes
    tokens: int  # real ones of the whole row
    delivered: float  # of this rank's slice
    filler: bool
    wire_bytes: int
    ready_s: float  # when it was there, rebuilt
    verified: bool


@dataclass(slots=True)
class RankCounters:
    """Counts of one rank within ``measured``; ``on_wait`` is called with the seconds of each wait counted."""

    measured: MeasureWindow = field(default_factory=MeasureWindow)
    on_wait: Callable[[float], None] = field(default=lambda _seconds: None)
    micro_batches: int = 0
    fillers: int = 0
    tokens: int = 0
    delivered: float = 0.0
    wire_bytes: int = 0
    verified: int = 0
    waits: WaitHistogram = field(default_factory=WaitHistogram)
    stopped_waits: WaitHistogram = field(default_factory=WaitHistogram)  # those that overlap the stop
    waiting_for: Counter[str] = field(default_factory=Counter)  # reason, or reason and rank -> milliseconds
    last_taken_s: float = 0.0

    def count(self, taken: RebuiltMicroBatch, asked_s: float, taken_s: float) -> None:
        """Count a micro-batch that the loop asked for at ``asked_s`` and took at ``taken_s``, if that is measured."""
        if not self.measured.counts(taken_s):
            return
        self.micro_batches += 1
        self.fillers += taken.filler
        self.tokens += 0 if taken.filler else taken.tokens
        self.delivered += taken.delivered
        self.wire_bytes += taken.wire_bytes
        self.verified += taken.verified
        self.last_taken_s = taken_s
        overlaps_stop = asked_s < self.measured.resume_s and taken_s >= self.measured.stop_s
        (self.stopped_waits if overlaps_stop else self.waits).add(taken_s - asked_s)
        self.on_wait(taken_s - asked_s)

    def count_wait(self, wait: Wait, now: float, interval_s: float) -> None:
        """Count what the server waits for: it says so every ``interval_s``, so each WAIT stands for that long."""
        if self.measured.counts(now):
            interval_ms = round(1000 * interval_s)
            self.waiting_for[f"{wait.reason}"] += interval_ms
            for name in wait.ranks:
                # "rank 3 (dp3·cp0·tp0·pp0): its loop last asked 9 s ago", or "and 12 more"
                rank = "others" if name.startswith("and ") else name.partition(": ")[0]
                self.waiting_for[f"{wait.reason}: {rank}"] += interval_ms
