"""Rendezvous of a stream with all its readers: the two rules that form an attempt.

*resume*       every reader names the same attempt: it goes on, each at its own position;
*fresh start*  every reader stands at its start, and all starts and the snapshots of them are the same: a new
               attempt of a new job, or of one restarted from a checkpoint.

The rules keep separate lists, *resume* one for each attempt, so a HELLO of one kind never displaces one of
another. A reader that has handed out nothing counts for both rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError
from packhorse.rules import Violation
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import Hello
from packhorse_service.protocol.stream_spec import disagreements
from packhorse_service.text.formatting import names

__all__ = ["PendingHello", "Quorum", "Rendezvous", "reject_disagreeing"]


EARLY_S = 2.0  # before a process gives up by itself, it hears why no attempt forms
ATTEMPTS_KNOWN = 64  # that ran here, the last of them
PROCESSES_A_READER = 8  # of which it is known when they first said HELLO


class PendingHello(NamedTuple):
    """A HELLO, the connection it came by, and its place in the order of arrival."""

    peer: bytes
    hello: Hello
    arrival: int = 0
    since_s: float = 0.0  # when this process first said it
    until_s: float = math.inf  # when it should hear why nothing forms


@dataclass(frozen=True, slots=True)
class Quorum:
    """All readers of a stream, and the attempt they form: an old one's name, or none for a new one."""

    attempt: bytes
    hellos: Mapping[Coordinates, PendingHello]

    @property
    def lowest(self) -> Position:
        """The position of the reader that is furthest behind."""
        return min(pending.hello.position for pending in self.hellos.values())

    @property
    def compared_from(self) -> int:
        """The step of the oldest row that a reader was handed last: made again, it tells whether the data is the same.

        Readers mostly stand at the end of a step when a server is gone: that row is of the step before.
        """
        hellos = [pending.hello for pending in self.hellos.values()]
        return min(hello.position.step - bool(hello.last_digest and not hello.position.index) for hello in hellos)

    @property
    def latest(self) -> int:
        """The place in the order of arrival of the HELLO that came last."""
        return max(pending.arrival for pending in self.hellos.values())

    def newest_snapshot(self) -> tuple[int, bytes, bytes]:
        """Return (step, digest, connection of a reader that holds it) of the newest snapshot that serves everybody.

        And from which the last row of everybody is made again, where there is one.

        Raises ``ContractError`` where none does, or where not all who hold it hold the same.
        """
        held = self._snapshots()
        if not held:
            raise ContractError(f"no reader holds a snapshot at or below {tuple(self.lowest)}: nothing to resume from")
        step = max((step for step in held if step <= self.compared_from), default=max(held))
        if len(held[step]) > 1:
            raise ContractError(f"readers hold different snapshots before step {step}: their checkpoints differ")
        ((digest, pending),) = held[step].items()
        return step, digest, pending.peer

    def _snapshots(self) -> dict[int, dict[bytes, PendingHello]]:
        """Return step -> digest -> a reader that holds it, of snapshots at or below every position."""
        held: dict[int, dict[bytes, PendingHello]] = {}
        lowest = self.lowest.step
        for pending in self.hellos.values():
            for ref in pending.hello.snapshots:
                if ref.step <= lowest:
                    held.setdefault(ref.step, {}).setdefault(ref.digest, pending)
        return held


Candidates = dict[Coordinates, PendingHello]  # the latest HELLO of each reader that one rule may make an attempt of


@dataclass(slots=True)
class CandidateLists:
    """The HELLOs that each of the two rules may make an attempt of, and the attempts that ran here before."""

    readers: frozenset[Coordinates]
    _fresh_start: Candidates = field(default_factory=dict)
    _resuming: dict[bytes, Candidates] = field(default_factory=dict)  # by attempt: a zombie's completes no other
    _ran: list[bytes] = field(default_factory=list)  # attempts that ran here; all but the last are over

    def of(self, hello: Hello) -> list[Candidates]:
        """Return the lists that a HELLO counts for."""
        lists = [] if hello.has_handed_out else [self._fresh_start]
        if hello.attempt not in (NO_ATTEMPT, *self._ran[:-1]):
            lists.append(self._resuming.setdefault(hello.attempt, {}))
        return lists

    def by_size(self) -> list[Candidates]:
        """Return the lists of both rules, the fullest first."""
        return sorted([self._fresh_start, *self._resuming.values()], key=len, reverse=True)

    def withdraw(self, hello: Hello) -> None:
        """Drop what this process has said before."""
        for known in self.by_size():
            if hello.reader in known and known[hello.reader].hello.client == hello.client:
                del known[hello.reader]

    def drop(self, gone: Callable[[PendingHello], bool]) -> None:
        """Drop every HELLO for which ``gone`` holds."""
        for known in self.by_size():
            for at in [at for at, pending in known.items() if gone(pending)]:
                del known[at]
        self._resuming = {attempt: known for attempt, known in self._resuming.items() if known}

    def attempt_started(self, attempt: bytes) -> None:
        """Note that an attempt runs: those that ran before are over, and nobody resumes them."""
        if attempt not in self._ran:
            self._ran = [*self._ran[1 - ATTEMPTS_KNOWN :], attempt]
            for earlier in self._ran[:-1]:
                self._resuming.pop(earlier, None)

    def is_over(self, hello: Hello) -> bool:
        """Return whether a process is of an attempt that ran here before a later one: its job has been begun again."""
        return hello.has_handed_out and hello.attempt in self._ran[:-1]

    def reset(self) -> None:
        """Forget every HELLO, and no attempt."""
        self._resuming.clear()
        self._fresh_start.clear()

    def starts_differ_since(self) -> float | None:
        """Return since when all readers are at their starts and these are not the same, where that is so."""
        if self._fresh_start.keys() != self.readers:
            return None
        hellos = self._fresh_start.values()
        differ = len({_start_of(pending.hello) for pending in hellos}) > 1
        return max(pending.since_s for pending in hellos) if differ else None

    def quorum(self) -> Quorum | None:
        """Return the attempt that forms now, if any.

        Where several lists are complete, the one with the latest HELLO wins: a process that started since
        tells that the others' attempt is over for it. Where no such process is, the lists are the same.
        """
        complete = [
            Quorum(attempt, dict(known)) for attempt, known in self._resuming.items() if known.keys() == self.readers
        ]
        if self._fresh_start.keys() == self.readers:
            starts = {_start_of(pending.hello) for pending in self._fresh_start.values()}
            if len(starts) == 1:
                complete.append(Quorum(NO_ATTEMPT, dict(self._fresh_start)))
        return max(complete, key=lambda quorum: quorum.latest, default=None)


@dataclass(slots=True)
class Arrivals:
    """The order in which HELLOs came, which process speaks on a connection, and since when each has waited."""

    processes_limit: int  # of which it is remembered
    _count: int = 0
    _first_hello_s: dict[bytes, float] = field(default_factory=dict)  # client -> its first HELLO
    _client_of: dict[bytes, bytes] = field(default_factory=dict)  # connection -> the client that said HELLO on it

    def is_another(self, peer: bytes, client: bytes) -> bool:
        """Return whether this connection has said before that it is another process."""
        return self._client_of.get(peer, client) != client

    @property
    def too_many(self) -> bool:
        """More processes than there should be in a while: those that wait no longer can be forgotten."""
        return max(len(self._first_hello_s), len(self._client_of)) > self.processes_limit

    def stamp(self, peer: bytes, hello: Hello, now: float) -> PendingHello:
        """Return a HELLO with its place in the order, and when its process shall hear why no attempt forms.

        That is a little before it gives up by itself; saying HELLO again does not put it off.
        """
        self._count += 1
        self._client_of[peer] = hello.client
        since = self._first_hello_s.setdefault(hello.client, now)
        until = since + hello.start_timeout_s - min(EARLY_S, hello.start_timeout_s / 4)
        return PendingHello(peer, hello, self._count, since, until)

    def forget(self, peer: bytes) -> None:
        """Forget who spoke on a connection that is gone."""
        self._client_of.pop(peer, None)

    def keep_only(self, clients: Container[bytes]) -> None:
        """Forget every process but these."""
        self._first_hello_s = {client: since for client, since in self._first_hello_s.items() if client in clients}
        self._client_of = {peer: client for peer, client in self._client_of.items() if client in clients}


@dataclass(slots=True)
class Rendezvous:
    """The processes that have said HELLO and wait for an attempt to form."""

    readers: frozenset[Coordinates]
    candidates: CandidateLists = field(init=False)
    _arrivals: Arrivals = field(init=False)
    _replaced: dict[bytes, PendingHello] = field(default_factory=dict)  # by client: another process came for its reader

    def __post_init__(self) -> None:
        self.candidates = CandidateLists(self.readers)
        self._arrivals = Arrivals(PROCESSES_A_READER * len(self.readers))

    def add(self, peer: bytes, hello: Hello, now: float) -> PendingHello | None:
        """Remember a HELLO, in place of what its process said before; return another process's that it replaces."""
        if self._arrivals.is_another(peer, hello.client):
            self.forget(peer)  # one connection is one process: it takes the place of what it said it was
        self._replaced.pop(hello.client, None)
        self.candidates.withdraw(hello)
        if self._arrivals.too_many:
            self._forget_absent()
        pending = self._arrivals.stamp(peer, hello, now)
        lists = self.candidates.of(hello)
        replaced = [known[hello.reader] for known in lists if hello.reader in known]
        for known in lists:
            known[hello.reader] = pending
        self._replaced |= {earlier.hello.client: earlier for earlier in replaced}
        return replaced[0] if replaced else None

    def replaced(self) -> list[PendingHello]:
        """Return the processes that are out once those that came later for their readers have met the others."""
        return list(self._replaced.values())

    def restored(self) -> list[PendingHello]:
        """Return the replaced processes whose later ones are gone: they shall say HELLO again, and are forgotten."""
        claimed = {pending.hello.reader for known in self.candidates.by_size() for pending in known.values()}
        back = [pending for pending in self.replaced() if pending.hello.reader not in claimed]
        for pending in back:
            del self._replaced[pending.hello.client]
        return back

    def _drop(self, gone: Callable[[PendingHello], bool]) -> None:
        self.candidates.drop(gone)
        self._replaced = {client: earlier for client, earlier in self._replaced.items() if not gone(earlier)}

    def forget(self, peer: bytes) -> None:
        """Forget the process of a connection: it has left."""
        self._arrivals.forget(peer)
        self._drop(lambda pending: pending.peer == peer)

    def attempt_started(self, attempt: bytes, clients: Container[bytes]) -> None:
        """Note that these processes have met, and who was replaced is out; whoever else waits goes on waiting."""
        self.candidates.attempt_started(attempt)
        self._replaced.clear()
        self._drop(lambda pending: pending.hello.client in clients)
        self._forget_absent()

    def _forget_absent(self) -> None:
        self._arrivals.keep_only({pending.hello.client for pending in self.pending()})

    def reset(self) -> None:
        """Forget all, who were told to leave; who has not heard it, and says HELLO again, is as late as before."""
        self.candidates.reset()
        self._replaced.clear()

    # Who is here -------------------------------------------------------------------------------------

    def pending(self) -> list[PendingHello]:
        """Return every process that has said HELLO and waits."""
        listed = {pending.peer: pending for known in self.candidates.by_size() for pending in known.values()}
        return [*listed.values(), *(earlier for earlier in self.replaced() if earlier.peer not in listed)]

    def is_waiting(self, peer: bytes) -> bool:
        """Return whether a process waits on this connection."""
        return any(pending.peer == peer for pending in self.pending())

    def already_said(self, peer: bytes, hello: Hello) -> bool:
        """Return whether just this was said by this connection already."""
        return any((pending.peer, pending.hello) == (peer, hello) for pending in self.pending())

    def overdue(self, now: float) -> bool:
        """Return whether one that waits would give up about now."""
        return any(now >= pending.until_s for pending in self.pending())

    def absent_from(self, known: Container[Coordinates]) -> list[Coordinates]:
        """Return the readers that a list is without."""
        return sorted(at for at in self.readers if at not in known)

    def missing(self) -> list[Coordinates]:
        """Return the readers that no process has said HELLO for."""
        return self.absent_from({pending.hello.reader for pending in self.pending()})

    def disagreement(self) -> list[str]:
        """Return who stands where, and with which snapshot, where all readers are here and yet no attempt forms."""
        if self.missing():
            return []
        places: dict[str, list[str]] = {}
        for hello in sorted((pending.hello for pending in self.pending()), key=lambda hello: hello.reader):
            places.setdefault(_place_of(hello), []).append(str(hello.reader))
        return [f"{names(readers)} at {place}" for place, readers in places.items()]


def _start_of(hello: Hello) -> tuple[Position, bytes]:
    """Return where a process began and the digest of the snapshot it needs for that; the origin needs none."""
    if hello.start == ORIGIN:
        return hello.start, b""
    return hello.start, next((ref.digest for ref in hello.snapshots if ref.step == hello.start.step), b"")


def _place_of(hello: Hello) -> str:
    """Return where a reader stands in words, with all that must be the same for an attempt to form."""
    _, snapshot = _start_of(hello)
    place = f"{tuple(hello.position)}" + (f" with snapshot {snapshot.hex()[:8]}" if snapshot else "")
    return f"{place} of attempt {hello.attempt.hex()[:8]}" if hello.has_handed_out else place


def reject_disagreeing(rendezvous: Rendezvous, quorum: Quorum | None) -> Iterator[tuple[bytes, tuple[Violation, ...]]]:
    """Forget the readers of a quorum that declare different contracts; yield whom to reject, and why."""
    hellos = quorum.hellos if quorum else {}
    violations = tuple(disagreements({at: pending.hello for at, pending in hellos.items()}))
    if violations:
        for pending in hellos.values():
            rendezvous.forget(pending.peer)
            yield pending.peer, violations
