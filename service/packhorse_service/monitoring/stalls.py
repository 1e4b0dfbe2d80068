"""Why a reader waits, and what keeps a stream from going on: one word and a sentence, made from the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import WaitReason
from packhorse_service.monitoring.status import Stall
from packhorse_service.protocol.diagnosis import (
    WORTH_NAMING_S,
    Blocked,
    Cause,
    Diagnosis,
    ReaderDiagnosis,
    ReaderState,
    StreamView,
)
from packhorse_service.protocol.wait_messages import described_ranks

__all__ = ["stall", "why"]

Found = Mapping[Coordinates, ReaderDiagnosis]
ALL_THE_SAME = (Cause.STARTUP, Cause.LOADING, Cause.PACKING)  # whoever waits for it


def why(diagnosis: Diagnosis, at: Coordinates) -> str:
    """Return the state of a reader as a sentence; nothing where there is nothing to explain."""
    return SENTENCES[diagnosis.readers[at].state](diagnosis, at)


def _absent(_diagnosis: Diagnosis, _at: Coordinates) -> str:
    return "has not said HELLO"


def _nothing(_diagnosis: Diagnosis, _at: Coordinates) -> str:
    return ""


def _forming(diagnosis: Diagnosis, at: Coordinates) -> str:
    """Return what keeps the attempt from running, for a reader that is here."""
    blocked = diagnosis.readers[at].blocked
    return STARTING[blocked.reason](diagnosis.view, blocked) if blocked else "the stream has failed"


def _for_readers(view: StreamView, blocked: Blocked) -> str:
    absent = ", ".join(described_ranks(view, blocked)) if blocked.whom else "the readers to agree"
    return f"waiting for {absent}"


def _for_snapshot(_view: StreamView, blocked: Blocked) -> str:
    return "waits for a reader's snapshot" if blocked.whom else "the stream is made again where the readers stand"


def _for_answers(view: StreamView, blocked: Blocked) -> str:
    return f"waits for {view.named(blocked.whom)} to acknowledge that the attempt begins"


STARTING: dict[WaitReason, Callable[[StreamView, Blocked], str]] = {
    WaitReason.READERS: _for_readers,
    WaitReason.SNAPSHOT: _for_snapshot,
    WaitReason.ANSWERS: _for_answers,
}


def _lost(diagnosis: Diagnosis, at: Coordinates) -> str:
    """Return how a reader was lost, and whether another process waits for its place."""
    silence = diagnosis.readers[at].since_s
    if diagnosis.view.readers[at].peer:
        text = f"nothing was heard from it for {silence:.0f} s: its process is stopped or gone, or the network is cut"
    else:
        text = f"its connection is gone, and nothing was heard from it for {silence:.0f} s"
    another = "; a new process for it waits, and can only begin again together with all others"
    return text + another * (at in diagnosis.view.waiting_at)


def _training(diagnosis: Diagnosis, at: Coordinates) -> str:
    reader = diagnosis.view.readers[at]
    age = reader.loop_age_s(diagnosis.now)
    return f"its training loop last asked {age:.0f} s ago; {reader.in_flight} micro-batches are ready for it"


def _waiting(diagnosis: Diagnosis, at: Coordinates) -> str:
    """Return what a reader waits for whose loop asks."""
    found, view = diagnosis.readers[at], diagnosis.view
    if found.blocked is None:
        ready = view.readers[at].in_flight
        return f"asks, and of {ready} micro-batches that were sent none has arrived for {found.since_s:.0f} s"
    if found.blocked.reason is WaitReason.SLOW_READERS:
        return f"waits for {view.named(found.blocked.whom)} to take step {view.low_watermark.step}"
    block = diagnosis.producing.block
    return f"the next step waits for {block}" if block else "the next step is being packed"


SENTENCES: dict[ReaderState, Callable[[Diagnosis, Coordinates], str]] = {
    ReaderState.ABSENT: _absent,
    ReaderState.FORMING: _forming,
    ReaderState.RECEIVING: _nothing,
    ReaderState.TRAINING: _training,
    ReaderState.WAITING: _waiting,
    ReaderState.LOST: _lost,
    ReaderState.LEFT: _nothing,
}


def stall(diagnosis: Diagnosis) -> Stall | None:
    """Return what keeps the stream from going on, if somebody has waited for longer than is usual."""
    waiting = {at: found for at, found in diagnosis.readers.items() if found.state.waits}
    long = {at: found for at, found in waiting.items() if found.since_s > WORTH_NAMING_S}
    if not long:
        return None
    cause, text = _root(diagnosis, long)
    return Stall(cause=cause, why=text, waiting=len(waiting))


def _root(diagnosis: Diagnosis, waiting: Found) -> tuple[Cause, str]:
    """Return the cause that explains the others, and the sentence for it."""
    for cause in ALL_THE_SAME:
        for at, found in waiting.items():
            if found.cause is cause:
                return cause, why(diagnosis, at)
    slow = {at: diagnosis.readers[at] for at in diagnosis.slowest}
    return (
        _because_of(diagnosis, Cause.NETWORK, waiting)
        or _because_of(diagnosis, Cause.NETWORK, slow)
        or _because_of(diagnosis, Cause.TRAINER, slow)
        or (Cause.SLOW_PEER, _slow(diagnosis, slow))
    )


def _because_of(diagnosis: Diagnosis, cause: Cause, readers: Found) -> tuple[Cause, str] | None:
    """Return those of the readers that do not go on for this cause, if there are any."""
    because = [at for at, found in readers.items() if found.cause is cause]
    return (cause, f"{diagnosis.view.named(because)}: {why(diagnosis, because[0])}") if because else None


def _slow(diagnosis: Diagnosis, slow: Found) -> str:
    """Return who keeps the others waiting: somebody who has left too early, or who is slow."""
    left = [at for at, found in slow.items() if found.state is ReaderState.LEFT]
    if left:
        return f"{diagnosis.view.named(left)} has left before the end"
    return f"{diagnosis.view.named(slow)} takes longer over a step than the others"
