"""What a Feed counts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FeedStats"]


@dataclass(frozen=True, slots=True)
class FeedStats:
    """What one rank has taken and waited for. Times are seconds."""

    micro_batches: int
    wait_seconds: float
    waits: dict[str, float]  # what the server said it was waiting for -> seconds the loop waited meanwhile
