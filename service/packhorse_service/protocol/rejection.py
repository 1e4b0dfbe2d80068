"""Why an attempt does not form, told to everybody at the deadline in the same words.

A reader that breaks a rule is rejected at once. The others wait for it; when the first of them would give up, all that
are here are rejected together, with one list: who was rejected and why, who is claimed twice, who is missing. The
server then waits for the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.rules import Violation
from packhorse.rules.runtime_rules import RANKS_AGREE
from packhorse.schema import HEADER_LIMIT_BYTES, pack
from packhorse.wire.hello import ForeignHello, Hello
from packhorse_service.text.formatting import names

__all__ = ["Rejections", "rank_name"]

REJECTED_LIMIT = 4096  # a HELLO says which reader it is, and in which layout: whatever it likes
TEXT_LIMIT = 400  # characters of one text of a violation
LIST_LIMIT_BYTES = HEADER_LIMIT_BYTES - 2048  # of all texts of a list, which must fit one header


@dataclass(slots=True)
class Rejections:
    """Obstacles to the attempt that is forming: readers that were rejected, and those claimed twice."""

    layout: ParallelLayout
    _rejected: dict[Coordinates, tuple[Violation, ...]] = field(default_factory=dict)
    _claimed_twice: set[Coordinates] = field(default_factory=set)

    def reject(self, hello: Hello | ForeignHello, violations: Iterable[Violation]) -> tuple[Violation, ...]:
        """Remember why a reader was rejected; return the violations with its name.

        It may stand in another layout: its rank there is what tells which process it is.
        """
        layout = hello.layout if isinstance(hello, Hello) else self.layout  # that of another version is not known
        name = rank_name(layout, hello.reader)
        named = _fit(replace(violation, field=f"{violation.field} of {name}") for violation in violations)
        at = self._here(layout, hello.reader)
        if at in self._rejected or len(self._rejected) < REJECTED_LIMIT:
            self._rejected[at] = named
        return named

    def _here(self, layout: ParallelLayout, reader: Coordinates) -> Coordinates:
        """Return the coordinates in this layout of a reader in another."""
        rank = layout.rank(reader)
        return self.layout.coordinates(rank) if 0 <= rank < self.layout.world_size else reader

    @property
    def rejected(self) -> set[Coordinates]:
        """Readers that have come and were rejected."""
        return set(self._rejected)

    def claim_twice(self, at: Coordinates) -> None:
        """Remember that a second process says that it is this reader."""
        self._claimed_twice.add(at)

    def accept(self, at: Coordinates) -> None:
        """Forget why a reader was rejected: it has come with a contract that holds."""
        self._rejected.pop(at, None)

    def clear(self) -> None:
        """Forget everything: an attempt has formed, or all have been told."""
        self._rejected.clear()
        self._claimed_twice.clear()

    def violations(self, missing: Iterable[Coordinates], disagreement: Iterable[str]) -> tuple[Violation, ...]:
        """Return the whole list, with who is missing and in what those that are here disagree."""
        return _fit(self._lines(sorted(set(missing) - self._rejected.keys()), list(disagreement)))

    def _lines(self, missing: list[Coordinates], disagreement: list[str]) -> Iterator[Violation]:
        for at in sorted(self._rejected):
            yield from self._rejected[at]
        for at in sorted(self._claimed_twice):
            got = f"{rank_name(self.layout, at)} claimed by two processes"
            remedy = "give each process its own rank"
            yield RANKS_AGREE.violation("readers", want="each coordinate once", got=got, remedy=remedy)
        if missing:
            got = f"without {names(missing, say=lambda at: rank_name(self.layout, at))}"
            remedy = "start these ranks, or correct rank and layout"
            yield RANKS_AGREE.violation("readers", want="complete", got=got, remedy=remedy)
        if disagreement:
            remedy = "resume all ranks from one checkpoint"
            got = "; ".join(disagreement)
            yield RANKS_AGREE.violation("start", want="the same for all readers", got=got, remedy=remedy)


def rank_name(layout: ParallelLayout, at: Coordinates) -> str:
    """Return a reader for people: its rank and its coordinates."""
    sizes = (layout.data, layout.context, layout.tensor, layout.pipeline)
    inside = all(0 <= coordinate < size for coordinate, size in zip(at, sizes, strict=True))
    return f"rank {layout.rank(at)} ({at})" if inside else f"reader {at}"


def _fit(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """Return as many as one header holds, and how many more there are: a longer list would reach nobody."""
    shown, left, room = list[Violation](), 0, LIST_LIMIT_BYTES
    for violation in map(_shorten, violations):
        room -= len(pack(violation))
        shown, left = (shown, left + 1) if left or room < 0 else ([*shown, violation], 0)
    if left:
        got = f"{left} more violations than fit this message"
        want, remedy = "a list that can be read", "correct these first"
        shown.append(RANKS_AGREE.violation("readers", want=want, got=got, remedy=remedy))
    return tuple(shown)


def _shorten(violation: Violation) -> Violation:
    return replace(
        violation,
        field=_cut(violation.field),
        want=_cut(violation.want),
        got=_cut(violation.got),
        remedy=_cut(violation.remedy),
    )


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}…"
