"""WAIT: what a stream waits for and whom, told to every reader that something is owed to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import Hello, Wait, WaitReason
from packhorse_service.protocol.readers import Phase
from packhorse_service.protocol.rejection import rank_name
from packhorse_service.text.formatting import names, names_listed

if TYPE_CHECKING:
    from packhorse_service.protocol.stream_session import StreamSession

__all__ = ["describe", "obstacles", "rejoining", "waits"]


def waits(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    """(connection, what it waits for), for each reader that waits."""
    since, waited = now - session.phase_since_s, session.rendezvous.waited_s(now)
    asked = _names(session, _asked(session))
    for peer, whom in _greeting(session):
        met = session.readers.by_peer(peer) is not None
        if met and session.phase is Phase.RESTORING:
            yield peer, _wait(session, WaitReason.SNAPSHOT, asked, since)
        elif not met or session.phase is not Phase.WELCOMING:  # else it has its WELCOME
            yield peer, _wait(session, WaitReason.READERS, whom, waited)
    if session.phase is Phase.WELCOMING:
        silent = _names(session, (reader.at for reader in session.readers if not reader.answered))
        for reader in session.readers:
            if reader.answered and reader.peer:
                yield reader.peer, _wait(session, WaitReason.ANSWERS, silent, since)
    if session.phase is Phase.RUNNING:
        yield from _owed(session, now)


def _greeting(session: StreamSession) -> Iterator[tuple[bytes, list[str]]]:
    """(connection, the readers it waits for) of each process that has said HELLO; once, by its fullest list."""
    told = set[bytes]()
    for known in session.rendezvous.candidates():
        whom = _names(session, session.rendezvous.absent_from(known)) or session.rendezvous.disagreement()
        for pending in known.values():
            if pending.peer not in told:
                told.add(pending.peer)
                yield pending.peer, whom
    for pending in session.rendezvous.replaced():
        yield pending.peer, _names(session, [pending.hello.reader])


def _asked(session: StreamSession) -> list[Coordinates]:
    """The reader whose snapshot was asked for."""
    reader = session.readers.by_peer(session.asked[2]) if session.asked else None
    return [reader.at] if reader else []


def obstacles(session: StreamSession) -> tuple[list[Coordinates], list[str]]:
    """What keeps those that wait from forming an attempt: who is missing, who disagrees."""
    if session.phase is not Phase.RUNNING:
        return session.rendezvous.missing(), session.rendezvous.disagreement()
    running = f"while attempt {session.attempt_number} runs: one rank cannot be replaced while the others train on"
    waiting = sorted({pending.hello.reader for pending in session.rendezvous.pending()})
    alone = names(waiting, say=lambda at: rank_name(session.spec.layout, at))
    return [], [f"that of another process for {alone}, {running}"]


def _owed(session: StreamSession, now: float) -> Iterator[tuple[bytes, Wait]]:
    low_watermark = session.readers.low_watermark
    slow = _names(session, (reader.at for reader in session.readers if reader.acked.step == low_watermark.step))
    for reader in session.readers:
        if reader.starved_since_s is None or not reader.peer:
            continue
        loading = reader.sent.step < low_watermark.step + session.spec.steps_ahead
        reason, whom = (WaitReason.LOADING, []) if loading else (WaitReason.SLOW_READERS, slow)
        yield reader.peer, _wait(session, reason, whom, now - reader.starved_since_s)


def _wait(session: StreamSession, reason: WaitReason, ranks: Iterable[str], waited_s: float) -> Wait:
    return Wait(stream=session.spec.stream, reason=reason, ranks=tuple(ranks), waited_s=max(waited_s, 0.0))


def _names(session: StreamSession, readers: Iterable[Coordinates]) -> list[str]:
    """The first of them by name, and how many more there are."""
    present = {pending.hello.reader: pending.hello for pending in session.rendezvous.pending()}
    return names_listed(readers, say=lambda at: _name(session, at, present.get(at)))


def _name(session: StreamSession, at: Coordinates, hello: Hello | None) -> str:
    """A reader for people: its rank, coordinates and what is known of it; ``hello`` of one that waits there."""
    name = rank_name(session.spec.layout, at)
    reader = session.readers.by_coordinates.get(at)
    if reader is None:
        return f"{name}: stands at {tuple(hello.position)} of another attempt" if hello else name
    if hello is not None and hello.client != reader.client and not hello.attempt:
        return f"{name}: a new process; it can only begin again together with all others"
    if reader.said_bye:
        return f"{name}: has left"
    return f"{name}: its loop last asked {reader.loop_idle_s:.0f} s ago" if reader.peer else f"{name}: not connected"


def rejoining(session: StreamSession, now: float) -> tuple[list[Coordinates], list[bytes]]:
    """Readers that nothing was heard from for long, and the connections of those that shall look for the server again.

    The silent ones may be where the endpoint's name points now.
    """
    silent, unheard = set(_silent(session, now)), _unheard(session, now)
    peers = {reader.peer for reader in session.readers if reader.at not in silent} if silent else set()
    if silent or unheard:
        peers |= {pending.peer for pending in session.rendezvous.pending()}
    return sorted(silent | unheard), sorted(peers - {b""})


def _silent(session: StreamSession, now: float) -> Iterator[Coordinates]:
    """Of an attempt. While the stream is made again a reader has nothing to say, as long as it is connected."""
    if session.phase is not Phase.ENDED:
        for reader in session.readers:
            quiet = not reader.said_bye and now - reader.heard_s > session.spec.rejoin_after_s
            if quiet and (session.phase is not Phase.RESTORING or not reader.peer):
                yield reader.at


def _unheard(session: StreamSession, now: float) -> set[Coordinates]:
    """Whom those that have said HELLO wait for, and who was not refused."""
    met = session.phase in (Phase.RESTORING, Phase.WELCOMING)
    if met or session.rendezvous.waited_s(now) <= session.spec.rejoin_after_s:
        return set()
    return set(session.rendezvous.absent_from(session.rendezvous.candidates()[0])) - session.rejections.rejected


def describe(session: StreamSession) -> str:
    """What a stream is doing, for a log line."""
    if session.phase is Phase.FORMING:
        return f"waiting for {', '.join(_names(session, session.rendezvous.missing())) or 'the readers to agree'}"
    return f"attempt {session.attempt_number}, {session.phase.name.lower()}, step {session.readers.low_watermark.step}"
