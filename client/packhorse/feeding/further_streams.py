"""The further streams of a feed, for evaluations: open ones, and those that only a loaded checkpoint names yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from packhorse.protocol.checkpoint_state import FeedState

__all__ = ["FurtherStreams"]

FeedT = TypeVar("FeedT")


@dataclass(slots=True)
class FurtherStreams(Generic[FeedT]):
    """Further streams by their names."""

    feeds: dict[str, FeedT] = field(default_factory=dict)
    kept: dict[str, FeedState] = field(default_factory=dict)  # nobody has opened them since their state was loaded

    def kept_state(self, name: str) -> FeedState:
        """Return the state that a stream which nobody has opened yet begins at."""
        return self.kept.get(name, FeedState(name))

    def add(self, name: str, feed: FeedT) -> None:
        """Note that a stream is open, at what was kept of it."""
        self.feeds[name] = feed
        self.kept.pop(name, None)
