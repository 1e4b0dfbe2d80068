"""What a rule is: data with a stable id, a check, the facts it needs, and its documentation.

A rule that holds says nothing. The documentation of a rule is the docstring of its check: the first line
says when it holds, the paragraphs behind it why, and the paragraph ``Source:`` where that can be checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts

__all__ = ["Case", "Finding", "Rule", "Severity", "Unchecked", "Violation", "near_multiples", "next_multiple"]


NOTHING_DECLARED = TrainerFacts()


class Severity(StrEnum):
    ERROR = "error"  # refuses the handshake
    WARN = "warn"  # reported to both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule: what was wanted, what was found, and what to change."""

    rule: str
    severity: Severity
    field: str
    want: str
    got: str
    remedy: str

    @property
    def message(self) -> str:
        """What is wrong, in one sentence; the remedy stands beside it."""
        return f"{self.field} is {self.got}, must be {self.want}"

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Case:
    """What the rules are about: one stream's contract on one layout, and what one reader says of itself."""

    layout: ParallelLayout
    contract: ResolvedContract
    trainer: TrainerFacts = NOTHING_DECLARED
    window: int | None = None  # micro-batches the reader lets the server send ahead

    def declares(self, fact: str) -> bool:
        """Whether a fact is declared: a field of ``TrainerFacts``, or ``window``."""
        return getattr(self if fact == "window" else self.trainer, fact) is not None


class Finding(NamedTuple):
    """One way in which a case breaks a rule. ``severity`` is given where it differs from the rule's."""

    field: str
    want: str
    got: str
    remedy: str
    severity: Severity | None = None


class Unchecked(NamedTuple):
    """A rule that concerns a case, and the facts that nobody declared."""

    rule: str
    missing: tuple[str, ...]


Check = Callable[[Case], Iterator[Finding]]


def _always(_case: Case) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """``check`` yields each way in which a case breaks the rule.

    ``needs`` names the facts without which it must stay silent; ``applies`` tells from the layout and the
    contract alone whether the rule concerns a case at all.
    """

    id: str
    severity: Severity
    check: Check
    needs: tuple[str, ...] = ()
    applies: Callable[[Case], bool] = _always

    @property
    def _paragraphs(self) -> list[str]:
        return (inspect.getdoc(self.check) or "").split("\n\n")

    @property
    def summary(self) -> str:
        """The rule in one line."""
        return self._paragraphs[0]

    @property
    def reason(self) -> str:
        """Why it is a rule."""
        return "\n\n".join(text for text in self._paragraphs[1:] if not text.startswith(SOURCE))

    @property
    def source(self) -> str:
        """Where the reason can be checked."""
        return " ".join(text.removeprefix(SOURCE).strip() for text in self._paragraphs if text.startswith(SOURCE))

    def violations(self, case: Case) -> Iterator[Violation]:
        if not self.applies(case):
            return
        for field, want, got, remedy, severity in self.check(case):
            yield Violation(
                rule=self.id, severity=severity or self.severity, field=field, want=want, got=got, remedy=remedy
            )

    def missing(self, case: Case) -> tuple[str, ...]:
        """The facts it needs and the case does not declare; none where the rule does not concern the case."""
        return tuple(fact for fact in self.needs if not case.declares(fact)) if self.applies(case) else ()


SOURCE = "Source:"


def next_multiple(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``value``, and at least ``unit``."""
    return max(1, -(-value // unit)) * unit


def near_multiples(value: int, unit: int) -> str:
    """A remedy: the multiples of ``unit`` around ``value``."""
    below, above = value // unit * unit, next_multiple(value + 1, unit)
    return f"use {below} or {above}" if below else f"use {above}"
