"""WAIT: what a stream waits for and whom, told to every reader that something is owed to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from packhorse.layout import Coordinates
from packhorse.wire import Wait, WaitReason
from packhorse_service.attempt import Phase
from packhorse_service.dismissal import rank_name

if TYPE_CHECKING:
    from packhorse_service.sessions import StreamSession

__all__ = ["describe", "obstacles", "others", "silent_readers", "waits"]

NAMES_SHOWN = 16


def waits(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    """(connection, what it waits for), for each reader that waits."""
    since = now - session.phase_since_s
    reason, whom, waited = _meeting(session, now)
    for greeting in session.meeting.present().values():
        if session.phase is Phase.WELCOMING and session.roster.of(greeting.peer) is not None:
            continue  # it has its WELCOME: below
        yield greeting.peer, _wait(session, reason, whom, waited)
    if session.phase is Phase.WELCOMING:
        silent = _names(session, (reader.at for reader in session.roster if not reader.answered))
        for reader in session.roster:
            if reader.answered and reader.peer:
                yield reader.peer, _wait(session, WaitReason.ANSWERS, silent, since)
    if session.phase is Phase.RUNNING:
        yield from _owed(session, now)


def _meeting(session: StreamSession, now: float) -> tuple[WaitReason, list[str], float]:
    """What those that have said HELLO wait for, whom, and for how long."""
    if session.phase is not Phase.RESTORING:
        whom = _names(session, session.meeting.missing()) or session.meeting.disagreement()
        return WaitReason.READERS, whom, session.meeting.waited(now)
    asked = session.roster.of(session.asked[2]) if session.asked else None
    return WaitReason.SNAPSHOT, _names(session, [asked.at] if asked else []), now - session.phase_since_s


def obstacles(session: StreamSession) -> tuple[list[Coordinates], list[str]]:
    """What keeps those that wait from forming an attempt: who is missing, who disagrees."""
    if session.phase is not Phase.RUNNING:
        return session.meeting.missing(), session.meeting.disagreement()
    running = f"while attempt {session.attempt_number} runs: one rank cannot be replaced while the others train on"
    alone = ", ".join(rank_name(session.offer.layout, at) for at in islice(session.meeting.present(), NAMES_SHOWN))
    return [], [f"new for {alone} {running}"]


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


def silent_readers(session: StreamSession, now: float) -> list[Coordinates]:
    """Readers that nothing was heard from for long: they may be where the endpoint's name points now."""
    after = session.offer.rejoin_after_s
    if session.phase is Phase.FORMING:
        unheard = set(session.meeting.missing()) - session.dismissal.refused
        return sorted(unheard) if session.meeting.waited(now) > after else []
    if session.phase is Phase.ENDED:
        return []
    silent = (reader for reader in session.roster if not reader.left and now - reader.heard_s > after)
    # While the stream is made again a reader has nothing to say, as long as it is connected.
    return [reader.at for reader in silent if session.phase is not Phase.RESTORING or not reader.peer]


def others(session: StreamSession, silent: Iterable[Coordinates]) -> list[bytes]:
    """The connections of all other readers, and of all that wait."""
    readers = {reader.peer for reader in session.roster if reader.at not in set(silent)}
    return sorted((readers | {greeting.peer for greeting in session.meeting.present().values()}) - {b""})


def describe(session: StreamSession) -> str:
    """What a stream is doing, for a log line."""
    if session.phase is Phase.FORMING:
        return f"waiting for {', '.join(_names(session, session.meeting.missing())) or 'the readers to agree'}"
    return f"attempt {session.attempt_number}, {session.phase.name.lower()}, step {session.roster.floor.step}"
