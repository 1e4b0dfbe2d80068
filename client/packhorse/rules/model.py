"""What a rule is: a stable id, what breaks it, and its documentation.

There are two kinds. A ``Rule`` is about what both sides declare: its check needs nothing else, so ``packhorse check``
asks the same questions as the handshake. A ``RuntimeRule`` is about what running processes do, and whoever finds it
broken builds the violation from it. A rule that holds says nothing.

The first line of a rule's documentation says when it holds, the paragraphs behind it why, and the paragraph ``Source:``
where that can be checked. That of a ``Rule`` is the docstring of its check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules.stack_versions import StackVersions

__all__ = [
    "Breach",
    "Documentation",
    "ExplainableRule",
    "Rule",
    "RuleInput",
    "RuntimeRule",
    "Severity",
    "Unchecked",
    "Violation",
]

NOTHING_DECLARED = TrainerFacts()
SOURCE = "Source:"


class Severity(StrEnum):
    """Consequence of a broken rule for the reader. Frozen: REJECT carries it in every version of the protocol."""

    ERROR = "error"  # the reader is rejected
    WARN = "warn"  # reported to both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Broken rule: what was wanted of a field, what was found, and what to change.

    Frozen in its fields: REJECT carries it in every version of the protocol.
    """

    rule: str
    severity: Severity
    field: str
    want: str
    got: str
    remedy: str

    @property
    def message(self) -> str:
        """Sentence on what is wrong; the remedy stands beside it."""
        return f"{self.field} is {self.got}, must be {self.want}"

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class RuleInput:
    """All that the rules are about: a stream's contract on its layout, and what one reader says of itself."""

    layout: ParallelLayout
    contract: ResolvedContract
    trainer: TrainerFacts = NOTHING_DECLARED
    window: int | None = None  # micro-batches the reader lets the server send ahead

    def declares(self, fact: str) -> bool:
        """Return whether a fact is declared: a field of ``TrainerFacts``, or ``window``."""
        return getattr(self if fact == "window" else self.trainer, fact) is not None


class Breach(NamedTuple):
    """Way in which an input breaks a rule. ``severity`` is given where it differs from the rule's."""

    field: str
    want: str
    got: str
    remedy: str
    severity: Severity | None = None


class Unchecked(NamedTuple):
    """A rule that concerns an input, and the facts that nobody declared."""

    rule: str
    missing: tuple[str, ...]


class Documentation(NamedTuple):
    """Text on a rule: when it holds, in one line; why; and where that can be checked."""

    summary: str
    reason: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Documentation:
        """Read a text of paragraphs: the first is the summary, one that begins with ``Source:`` the source."""
        summary, *rest = inspect.cleandoc(text).split("\n\n")
        sources = [text.removeprefix(SOURCE).strip() for text in rest if text.startswith(SOURCE)]
        return cls(summary, "\n\n".join(text for text in rest if not text.startswith(SOURCE)), " ".join(sources))


class ExplainableRule(Protocol):
    """Rule of any kind, as its documentation shows it."""

    @property
    def id(self) -> str:
        """Name in capitals, the same for good."""
        ...

    @property
    def severity(self) -> Severity:
        """Consequence of a breach, unless the breach itself says otherwise."""
        ...

    @property
    def documentation(self) -> Documentation:
        """Text on when the rule holds, why, and where that can be checked."""
        ...

    @property
    def checked(self) -> str:
        """Sentence on what it needs, or who checks it and when; empty where it is always checked."""
        ...

    @property
    def held_against(self) -> tuple[StackVersions, ...]:
        """Versions of stacks whose code it was held against; none where it is about Packhorse alone."""
        ...


Check = Callable[[RuleInput], Iterator[Breach]]


def always(_given: RuleInput) -> bool:
    """Return true: a rule concerns every input, unless it says otherwise."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule about what is declared. ``check`` yields each way in which an input breaks it.

    ``needs`` names the facts without which it must stay silent; ``applies`` tells from the layout, the contract and
    the trainer's stack whether the rule concerns an input at all; ``held_against`` names the versions of stacks whose
    code it was compared with.
    """

    id: str
    check: Check
    needs: tuple[str, ...] = ()
    applies: Callable[[RuleInput], bool] = always
    severity: Severity = Severity.ERROR
    held_against: tuple[StackVersions, ...] = ()

    @property
    def documentation(self) -> Documentation:
        """Text on when the rule holds, why, and where that can be checked: the docstring of its check."""
        return Documentation.parse(self.check.__doc__ or "")

    @property
    def checked(self) -> str:
        """Sentence on the facts it needs."""
        return f"Needs the trainer's {', '.join(self.needs)}." if self.needs else ""

    def violations(self, given: RuleInput) -> Iterator[Violation]:
        """Yield what breaks this rule, where it concerns the input."""
        if not self.applies(given):
            return
        for field, want, got, remedy, severity in self.check(given):
            yield Violation(
                rule=self.id, severity=severity or self.severity, field=field, want=want, got=got, remedy=remedy
            )

    def missing(self, given: RuleInput) -> tuple[str, ...]:
        """Return the facts it needs and nobody declared; none where the rule does not concern the input."""
        return tuple(fact for fact in self.needs if not given.declares(fact)) if self.applies(given) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRule:
    """Rule about what running processes do, which no declaration alone can break."""

    id: str
    checked: str  # a sentence: who checks it, and when
    documentation: Documentation
    severity: Severity = Severity.ERROR
    held_against: tuple[StackVersions, ...] = ()

    def violation(self, field: str, *, want: str, got: str, remedy: str) -> Violation:
        """Return that it is broken: what was wanted of ``field``, what was found, and what to change."""
        return Violation(rule=self.id, severity=self.severity, field=field, want=want, got=got, remedy=remedy)
