"""WAIT: what a stream waits for and whom, told to every reader that something is owed to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import Hello, Wait, WaitReason
from packhorse_service.protocol.readers import Phase
from packhorse_service.protocol.rejection import rank_name

if TYPE_CHECKING:
    from packhorse_service.protocol.stream_session import StreamSession

__all__ = ["describe", "obstacles", "rejoining", "waits"]

NAMES_SHOWN = 16


def waits(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    """(connection, what it waits for), for each reader that waits."""
    since, waited = now - session.phase_since_s, session.meeting.waited(now)
    asked = _names(session, _asked(session))
    for peer, whom in _greeting(session):
        met = session.roster.of(peer) is not None
        if met and session.phase is Phase.RESTORING:
            yield peer, _wait(session, WaitReason.SNAPSHOT, asked, since)
        elif not met or session.phase is not Phase.WELCOMING:  # else it has its WELCOME
            yield peer, _wait(session, WaitReason.READERS, whom, waited)
    if session.phase is Phase.WELCOMING:
        silent = _names(session, (reader.at for reader in session.roster if not reader.answered))
        for reader in session.roster:
            if reader.answered and reader.peer:
                yield reader.peer, _wait(session, WaitReason.ANSWERS, silent, since)
    if session.phase is Phase.RUNNING:
        yield from _owed(session, now)


def _greeting(session: StreamSession) -> Iterator[tuple[bytes, list[str]]]:
    """(connection, the readers it waits for) of each process that has said HELLO; once, by its fullest list."""
    told = set[bytes]()
    for known in session.meeting.lists():
        whom = _names(session, session.meeting.absent(known)) or session.meeting.disagreement()
        for greeting in known.values():
            if greeting.peer not in told:
                told.add(greeting.peer)
                yield greeting.peer, whom
    for greeting in session.meeting.superseded():
        yield greeting.peer, _names(session, [greeting.hello.reader])


def _asked(session: StreamSession) -> list[Coordinates]:
    """The reader whose snapshot was asked for."""
    reader = session.roster.of(session.asked[2]) if session.asked else None
    return [reader.at] if reader else []


def obstacles(session: StreamSession) -> tuple[list[Coordinates], list[str]]:
    """What keeps those that wait from forming an attempt: who is missing, who disagrees."""
    if session.phase is not Phase.RUNNING:
        return session.meeting.missing(), session.meeting.disagreement()
    running = f"while attempt {session.attempt_number} runs: one rank cannot be replaced while the others train on"
    waiting = sorted({greeting.hello.reader for greeting in session.meeting.greetings()})
    alone = ", ".join(rank_name(session.spec.layout, at) for at in waiting[:NAMES_SHOWN])
    return [], [f"that of another process for {alone}, {running}"]


def _owed(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    floor = session.roster.floor
    slow = _names(session, (reader.at for reader in session.roster if reader.acked.step == floor.step))
    for reader in session.roster:
        if reader.owed_since_s is None or not reader.peer:
            continue
        loading = reader.sent.step < floor.step + session.spec.steps_ahead
        reason, whom = (WaitReason.LOADING, []) if loading else (WaitReason.SLOW_READERS, slow)
        yield reader.peer, _wait(session, reason, whom, now - reader.owed_since_s)


def _wait(session: StreamSession, reason: WaitReason, ranks: Iterable[str], waited_s: float) -> Wait:
    return Wait(stream=session.spec.stream, reason=reason, ranks=tuple(ranks), waited_s=max(waited_s, 0.0))


def _names(session: StreamSession, readers: Iterable[Coordinates]) -> list[str]:
    """The first of them by name, and how many more there are."""
    listed = list(readers)
    present = {greeting.hello.reader: greeting.hello for greeting in session.meeting.greetings()}
    names = [_name(session, at, present.get(at)) for at in islice(listed, NAMES_SHOWN)]
    return [*names, f"and {len(listed) - NAMES_SHOWN} more"] if len(listed) > NAMES_SHOWN else names


def _name(session: StreamSession, at: Coordinates, hello: Hello | None) -> str:
    """A reader for people: its rank, coordinates and what is known of it; ``hello`` of one that waits there."""
    name = rank_name(session.spec.layout, at)
    reader = session.roster.by_coordinates.get(at)
    if reader is None:
        return f"{name}: stands at {tuple(hello.position)} of another attempt" if hello else name
    if hello is not None and hello.client != reader.client and not hello.attempt:
        return f"{name}: a new process; it can only begin again together with all others"
    if reader.left:
        return f"{name}: has left"
    return f"{name}: its loop last asked {reader.loop_idle_s:.0f} s ago" if reader.peer else f"{name}: not connected"


def rejoining(session: StreamSession, now: float) -> tuple[list[Coordinates], list[bytes]]:
    """Readers that nothing was heard from for long, and the connections of those that shall look for the server again.

    The silent ones may be where the endpoint's name points now.
    """
    silent, unheard = set(_silent(session, now)), _unheard(session, now)
    peers = {reader.peer for reader in session.roster if reader.at not in silent} if silent else set()
    if silent or unheard:
        peers |= {greeting.peer for greeting in session.meeting.greetings()}
    return sorted(silent | unheard), sorted(peers - {b""})


def _silent(session: StreamSession, now: float) -> Iterator[Coordinates]:
    """Of an attempt. While the stream is made again a reader has nothing to say, as long as it is connected."""
    if session.phase is not Phase.ENDED:
        for reader in session.roster:
            quiet = not reader.left and now - reader.heard_s > session.spec.rejoin_after_s
            if quiet and (session.phase is not Phase.RESTORING or not reader.peer):
                yield reader.at


def _unheard(session: StreamSession, now: float) -> set[Coordinates]:
    """Whom those that have said HELLO wait for, and who was not refused."""
    met = session.phase in (Phase.RESTORING, Phase.WELCOMING)
    if met or session.meeting.waited(now) <= session.spec.rejoin_after_s:
        return set()
    return set(session.meeting.absent(session.meeting.lists()[0])) - session.dismissal.refused


def describe(session: StreamSession) -> str:
    """What a stream is doing, for a log line."""
    if session.phase is Phase.FORMING:
        return f"waiting for {', '.join(_names(session, session.meeting.missing())) or 'the readers to agree'}"
    return f"attempt {session.attempt_number}, {session.phase.name.lower()}, step {session.roster.floor.step}"
