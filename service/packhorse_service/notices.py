"""WAIT: what a stream waits for and whom, told to every reader that something is owed to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from packhorse.layout import Coordinates
from packhorse.wire import Wait, WaitReason
from packhorse_service.attempt import Phase, Reader
from packhorse_service.dismissal import rank_name

if TYPE_CHECKING:
    from packhorse_service.sessions import StreamSession

__all__ = ["describe", "silent_readers", "waits"]

NAMES_SHOWN = 16


def waits(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    """(connection, what it waits for), for each reader that waits."""
    since = now - session.phase_since_s
    reason, whom = WaitReason.SNAPSHOT, list[str]()
    if session.phase is not Phase.RESTORING:
        reason = WaitReason.READERS
        whom = _names(session, session.meeting.missing()) or session.meeting.disagreement()
    for greeting in session.meeting.waiting():
        if session.phase is Phase.WELCOMING and session.roster.of(greeting.peer) is not None:
            continue  # it has its WELCOME: below
        yield greeting.peer, _wait(session, reason, whom, since)
    if session.phase is Phase.WELCOMING:
        silent = _names(session, (reader.at for reader in session.roster if not reader.answered))
        for reader in session.roster:
            if reader.answered and reader.peer:
                yield reader.peer, _wait(session, WaitReason.ANSWERS, silent, since)
    if session.phase is Phase.RUNNING:
        yield from _owed(session, now)


def _owed(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    floor = session.roster.floor
    slow = _names(session, (reader.at for reader in session.roster if reader.acked.step == floor.step))
    for reader in session.roster:
        if reader.owed_since_s is None or not reader.peer:
            continue
        loading = reader.sent.step < floor.step + session.offer.steps_ahead
        reason, whom = (WaitReason.LOADING, []) if loading else (WaitReason.SLOW_READERS, slow)
        yield reader.peer, _wait(session, reason, whom, now - reader.owed_since_s)


def _wait(session: StreamSession, reason: WaitReason, whom: Iterable[str], since_s: float) -> Wait:
    return Wait(stream=session.offer.stream, reason=reason, whom=tuple(whom), since_s=max(since_s, 0.0))


def _names(session: StreamSession, readers: Iterable[Coordinates]) -> list[str]:
    """The first of them by name, and how many more there are."""
    listed = list(readers)
    present = session.meeting.present().keys()
    names = [_name(session, at, at in present) for at in islice(listed, NAMES_SHOWN)]
    return [*names, f"and {len(listed) - NAMES_SHOWN} more"] if len(listed) > NAMES_SHOWN else names


def _name(session: StreamSession, at: Coordinates, greets: bool) -> str:
    """A reader for people: its rank, coordinates and what is known of it."""
    name = rank_name(session.offer.layout, at)
    reader = session.roster.by_coordinates.get(at)
    if reader is None:
        return name
    if greets:
        return f"{name}: a new process; it can only begin again together with all others"
    if reader.left:
        return f"{name}: has left"
    return f"{name}: its loop last asked {reader.idle_s:.0f} s ago" if reader.peer else f"{name}: not connected"


def silent_readers(session: StreamSession, now: float) -> list[Reader]:
    """Readers of a running attempt that nothing was heard from for long."""
    if session.phase is not Phase.RUNNING:
        return []
    after = session.offer.rejoin_after_s
    return [reader for reader in session.roster if not reader.left and now - reader.heard_s > after]


def describe(session: StreamSession) -> str:
    """What a stream is doing, for a log line."""
    if session.phase is Phase.FORMING:
        return f"waiting for {', '.join(_names(session, session.meeting.missing())) or 'the readers to agree'}"
    return f"attempt {session.attempt_number}, {session.phase.name.lower()}, step {session.roster.floor.step}"
