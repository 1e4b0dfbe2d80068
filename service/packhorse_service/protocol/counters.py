"""Counters of what a stream has done since its server started; its session counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from packhorse.rules import Violation
from packhorse_service.framing import StepTotals

__all__ = ["StreamCounters"]


@dataclass(slots=True)
class StreamCounters:
    """Counters of a stream. Tokens and slots are those of the steps that were made; a step made again counts again."""

    steps: int = 0
    microbatches: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    slots: int = 0
    delivered_steps: int = 0  # taken by every reader
    replayed: int = 0  # micro-batches sent again
    reconnects: int = 0
    rejects: Counter[str] = field(default_factory=Counter)  # by rule

    def add_step(self, totals: StepTotals) -> None:
        """Count a step that was made."""
        self.steps += 1
        self.microbatches += totals.microbatches
        self.tokens += totals.tokens
        self.loss_tokens += totals.loss_tokens
        self.slots += totals.slots

    def add_reconnect(self, again: int) -> None:
        """Count a reader that is back, and the micro-batches that it is sent again."""
        self.reconnects += 1
        self.replayed += again

    def add_reject(self, violations: Iterable[Violation]) -> None:
        """Count a reader that was rejected. A rule that it broke in several fields counts once."""
        self.rejects.update({violation.rule for violation in violations})
