"""Counts of a Feed, for whoever watches a training run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FeedStats"]


@dataclass(frozen=True, slots=True)
class FeedStats:
    """Micro-batches that one rank has taken, and what it waited for. Times are seconds."""

    micro_batches: int
    wait_seconds: float
    waits: dict[str, float]  # what the server said it was waiting for -> seconds the loop waited meanwhile
