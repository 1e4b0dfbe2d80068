"""How a stream and all its readers meet: the two rules that form an attempt.

*return*  every reader names the same attempt: it goes on, each at its own position;
*begin*   every reader stands at its start, and all starts and the snapshots of them are the same: a new
          attempt of a new job, or of one restarted from a checkpoint.

The rules keep separate lists, so a HELLO of one kind never displaces one of the other. A reader that has
handed out nothing counts for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from packhorse.layout import Coordinates
from packhorse.microbatch import ORIGIN, Position
from packhorse.wire import NO_ATTEMPT, Hello

__all__ = ["Formation", "Greeting", "Meeting"]


EARLY_S = 2.0


class Greeting(NamedTuple):
    """A HELLO, the connection it came by, and its place in the order of arrival."""

    peer: bytes
    hello: Hello
    arrival: int = 0
    until_s: float = math.inf  # when it should hear why nothing forms


@dataclass(frozen=True, slots=True)
class Formation:
    """All readers of a stream, and the attempt they form: an old one's name, or none for a new one."""

    attempt: bytes
    greetings: Mapping[Coordinates, Greeting]

    @property
    def lowest(self) -> Position:
        """The position furthest behind."""
        return min(greeting.hello.position for greeting in self.greetings.values())

    @property
    def compared_from(self) -> int:
        """The step of the oldest row that a reader was handed last: made again, it tells whether the data is the same.

        Readers mostly stand at the end of a step when a server is gone: that row is of the step before.
        """
        hellos = [greeting.hello for greeting in self.greetings.values()]
        return min(h.position.step - bool(h.last_digest and not h.position.index) for h in hellos)

    @property
    def latest(self) -> int:
        return max(greeting.arrival for greeting in self.greetings.values())

    def snapshots(self) -> dict[int, dict[bytes, Greeting]]:
        """step -> digest -> a reader that holds it, of snapshots at or below every position."""
        held: dict[int, dict[bytes, Greeting]] = {}
        for greeting in self.greetings.values():
            for ref in greeting.hello.snapshots:
                if ref.step <= self.lowest.step:
                    held.setdefault(ref.step, {}).setdefault(ref.digest, greeting)
        return held


@dataclass(slots=True)
class Meeting:
    """The latest HELLO of each reader, by the rule it can serve."""

    readers: frozenset[Coordinates]
    _arrivals: int = 0
    # By attempt: a process of an attempt that is over must not stand in for one of the attempt that returns.
    _returning: dict[bytes, dict[Coordinates, Greeting]] = field(default_factory=dict)
    _beginning: dict[Coordinates, Greeting] = field(default_factory=dict)

    def note(self, peer: bytes, hello: Hello, now: float) -> Greeting | None:
        """Remember a HELLO; returns another process's that it replaces: the same reader, by the same rule."""
        self._arrivals += 1
        # A little before it gives up by itself, so that it hears the reason.
        until = now + hello.patience_s - min(EARLY_S, hello.patience_s / 4)
        greeting = Greeting(peer, hello, self._arrivals, until)
        for rule in self._rules():
            if (known := rule.get(hello.reader)) and known.hello.client == hello.client:
                del rule[hello.reader]  # what it said before does not hold any more
        rules = [self._returning.setdefault(hello.attempt, {})] if hello.attempt != NO_ATTEMPT else []
        rules += [] if hello.has_handed_out else [self._beginning]
        replaced = None
        for rule in rules:
            replaced = rule.get(hello.reader, replaced)
            rule[hello.reader] = greeting
        return replaced

    def _rules(self) -> list[dict[Coordinates, Greeting]]:
        return [self._beginning, *self._returning.values()]

    def forget(self, peer: bytes) -> None:
        """This connection's reader has left."""
        for rule in self._rules():
            for reader in [r for r, greeting in rule.items() if greeting.peer == peer]:
                del rule[reader]

    def clear(self) -> None:
        """The attempt runs: whoever says HELLO from now on is counted anew."""
        self._returning.clear()
        self._beginning.clear()

    def present(self) -> dict[Coordinates, Greeting]:
        """Every reader that has said HELLO and waits: the latest process of each."""
        return {greeting.hello.reader: greeting for greeting in self.waiting()}

    def waiting(self) -> list[Greeting]:
        """Every process that has said HELLO and waits, the latest last."""
        by_peer = {greeting.peer: greeting for rule in self._rules() for greeting in rule.values()}
        return sorted(by_peer.values(), key=lambda greeting: greeting.arrival)

    def overdue(self, now: float) -> bool:
        """Whether one that waits would give up about now."""
        return any(now >= greeting.until_s for greeting in self.waiting())

    def missing(self) -> list[Coordinates]:
        return sorted(self.readers - self.present().keys())

    def formed(self) -> Formation | None:
        """The attempt that forms now, if any.

        Where both rules hold, the one with the latest HELLO wins: a process that started since tells
        that the others' attempt is over for it. Where no such process is, both lists are the same.
        """
        complete = []
        for attempt, rule in self._returning.items():
            if self._complete(rule):
                complete.append(Formation(attempt, dict(rule)))
        if self._complete(self._beginning) and _same(_begins_at(g.hello) for g in self._beginning.values()):
            complete.append(Formation(NO_ATTEMPT, dict(self._beginning)))
        return max(complete, key=lambda formation: formation.latest, default=None)

    def disagreement(self) -> list[str]:
        """Where all readers are here and yet no attempt forms: what each says."""
        if self.missing():
            return []
        return [f"{reader} stands at {tuple(g.hello.position)}" for reader, g in sorted(self.present().items())]

    def _complete(self, rule: Mapping[Coordinates, Greeting]) -> bool:
        return rule.keys() == self.readers


def _begins_at(hello: Hello) -> tuple[Position, bytes]:
    """The start and the digest of the snapshot it needs; the origin needs none."""
    if hello.start == ORIGIN:
        return hello.start, b""
    return hello.start, next((ref.digest for ref in hello.snapshots if ref.step == hello.start.step), b"")


def _same(values: Iterable[object]) -> bool:
    return len(set(values)) == 1
