"""Disagreements with a stack that are meant: what they are told by, why they stay, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["COMMON", "Accepted", "Disagreement", "miscounted", "unexplained"]


COMMON = 0.01  # a reason of a smaller share may be missing from a sample


class Disagreement(NamedTuple):
    """A case that one side refuses and the other accepts."""

    case: Any
    cfg: Any
    """The configuration as written, not yet validated."""
    upstream: str
    """Why the stack refuses, empty where it does not."""
    rules: tuple[str, ...]
    """By which rules Packhorse refuses, empty where it does not."""

    def __repr__(self) -> str:
        """Return one line for people."""
        said = (
            f"Packhorse refuses: {', '.join(self.rules)}" if self.rules else f"upstream refuses: {self.upstream[:200]}"
        )
        return f"{self.case}: {said}"

    @property
    def grounds(self) -> tuple[str, ...]:
        """What each needs a reason: every rule that refuses, or the stack's message."""
        return self.rules or (self.upstream,)


def always(_found: Disagreement) -> bool:
    """Accept wherever the ground occurs."""
    return True


@dataclass(frozen=True)
class Accepted:
    """One kind of disagreement that is meant. One that no longer occurs, or that spreads, fails the test."""

    ground: str
    """Rule that refuses, or a part of the stack's message."""
    reason: str
    share: float
    """Largest share of all cases that it may have."""
    when: Callable[[Disagreement], bool] = always

    def covers(self, ground: str, found: Disagreement) -> bool:
        """Return whether this is why."""
        named = ground == self.ground if found.rules else self.ground in ground
        return named and self.when(found)


def unexplained(found: Iterable[Disagreement], accepted: Iterable[Accepted]) -> list[Disagreement]:
    """Return the disagreements that have a ground without a reason."""
    table = tuple(accepted)
    return [
        one for one in found if not all(any(entry.covers(ground, one) for entry in table) for ground in one.grounds)
    ]


def miscounted(found: Iterable[Disagreement], accepted: Iterable[Accepted], cases: int) -> list[str]:
    """Return what no longer occurs, or occurs more often than its reason allows."""
    disagreements = list(found)
    lines = []
    for entry in accepted:
        count = sum(any(entry.covers(ground, one) for ground in one.grounds) for one in disagreements)
        least, most = int(entry.share >= COMMON), int(entry.share * cases)
        if not least <= count <= most:
            lines.append(f"{entry.ground}: {count} of {cases}, expected {least} … {most}: {entry.reason}")
    return lines
