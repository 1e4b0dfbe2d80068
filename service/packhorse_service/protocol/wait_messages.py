"""WAIT and the rest of what is told as time passes: what a stream waits for, and that a silent reader is looked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import ErrorCode, Wait, WaitReason
from packhorse_service.protocol.attempt import Attempt, Phase
from packhorse_service.protocol.diagnosis import (
    Blocked,
    Diagnosis,
    PendingView,
    StreamView,
    diagnose,
    view_stream,
)
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.hello_handler import HelloHandler
from packhorse_service.protocol.rejection import Rejections
from packhorse_service.protocol.rendezvous import Rendezvous
from packhorse_service.protocol.step_buffer import StepBuffer
from packhorse_service.text.formatting import names, names_listed

__all__ = ["KeepAlive", "described_ranks", "wait_messages"]

log = logging.getLogger("packhorse.server")

SETTLED_S = 10.0  # without a new process: nobody who could stand elsewhere is on the way any more


@dataclass(slots=True)
class KeepAlive:
    """Messages that time alone brings about. Methods return the effects to carry out, in order."""

    attempt: Attempt
    rendezvous: Rendezvous
    buffer: StepBuffer
    rejections: Rejections
    hellos: HelloHandler
    _waits_sent_s: float = 0.0  # when the last round of WAIT was sent
    _rejoin_sent_s: float = 0.0

    def view(self) -> StreamView:
        """Return what is to be seen of the stream now."""
        return view_stream(self.attempt, self.rendezvous, self.buffer, self.rejections)

    def tick_or_reject(self, now: float) -> list[Effect]:
        """Reject all that wait, if they disagree, or the first would give up about now; else say who waits for whom."""
        if not self.rendezvous.overdue(now) and not self._disagree(now):
            return self.hellos.settle_contest(now) or self.tick(now)
        missing, disagreement = obstacles(self.view())
        return self.hellos.reject_all(self.rejections.violations(missing, disagreement))

    def _disagree(self, now: float) -> bool:
        """Return whether all readers are at starts that differ, and no process has come for a while."""
        since_s = self.rendezvous.candidates.starts_differ_since()
        return since_s is not None and now - since_s >= SETTLED_S

    def tick(self, now: float) -> list[Effect]:
        """Say every keep-alive interval who waits for whom."""
        if now - self._waits_sent_s < self.attempt.spec.keep_alive_s:
            return []
        self._waits_sent_s = now
        again: list[Effect] = [
            self.attempt.error(pending.peer, ErrorCode.HELLO, "say HELLO again")
            for pending in self.rendezvous.restored()
        ]
        view = self.view()
        waits = (Send(peer, wait) for peer, wait in wait_messages(diagnose(view, now)))
        return [*again, *waits, *self._rejoins(view, now)]

    def _rejoins(self, view: StreamView, now: float) -> list[Effect]:
        """Have readers look for one that is silent for long, where the endpoint's name points now."""
        if now - self._rejoin_sent_s < view.spec.rejoin_after_s:
            return []
        silent, unheard = silent_readers(view, now)
        peers = {reader.peer for reader in view.readers.values() if reader.at not in silent} if silent else set()
        if silent or unheard:
            peers |= {pending.peer for pending in view.pending}
        told = sorted(peers - {b""})
        if not told:
            return []
        self._rejoin_sent_s = now
        text = (
            f"nothing heard from {', '.join(map(str, sorted(silent | unheard)))} for {view.spec.rejoin_after_s:.0f} s"
        )
        log.warning("stream %r: %s; %d readers are to look for the server again", view.spec.stream, text, len(told))
        return [self.attempt.error(peer, ErrorCode.REJOIN, text) for peer in told]


def wait_messages(diagnosis: Diagnosis) -> Iterator[tuple[bytes, Wait]]:
    """Yield (connection, WAIT) for each that something is owed to, by the diagnosis of it."""
    view = diagnosis.view
    for peer, blocked in diagnosis.pending.items():
        yield peer, _wait(view, blocked)
    told = view.phase is Phase.RUNNING
    for at, reader in view.readers.items():
        blocked_here = diagnosis.readers[at].blocked
        answered = view.phase is Phase.WELCOMING and reader.answered
        if (told or answered) and reader.peer and blocked_here is not None:
            yield reader.peer, _wait(view, blocked_here)


def _wait(view: StreamView, blocked: Blocked) -> Wait:
    ranks = described_ranks(view, blocked)
    waited_s = max(blocked.waited_s, 0.0)
    return Wait(stream=view.spec.stream, reason=blocked.reason, ranks=tuple(ranks), waited_s=waited_s)


def described_ranks(view: StreamView, blocked: Blocked) -> list[str]:
    """Return whom a reader waits for, with what is known of each; where nobody is missing, who disagrees.

    Of many the first, and how many more there are.
    """
    if not blocked.whom:
        return list(view.disagreement) if blocked.reason is WaitReason.READERS else []
    return names_listed(blocked.whom, say=lambda at: _described(view, at, view.waiting_at.get(at)))


def _described(view: StreamView, at: Coordinates, pending: PendingView | None) -> str:
    """Return a reader for people: its rank, coordinates and what is known of it, and of one that waits there."""
    name = view.name(at)
    reader = view.readers.get(at)
    if reader is None:
        return f"{name}: stands at {tuple(pending.position)} of another attempt" if pending else name
    if pending is not None and pending.client != reader.client and not pending.of_attempt:
        return f"{name}: a new process; it can only begin again together with all others"
    if reader.said_bye:
        return f"{name}: has left"
    return f"{name}: its loop last asked {reader.loop_idle_s:.0f} s ago" if reader.peer else f"{name}: not connected"


def obstacles(view: StreamView) -> tuple[tuple[Coordinates, ...], tuple[str, ...]]:
    """Return what keeps those that wait from forming an attempt: who is missing, who disagrees."""
    if view.phase is not Phase.RUNNING:
        return view.missing, view.disagreement
    running = f"while attempt {view.attempt_number} runs: one rank cannot be replaced while the others train on"
    alone = names(sorted({pending.at for pending in view.pending}), say=view.name)
    return (), (f"that of another process for {alone}, {running}",)


def silent_readers(view: StreamView, now: float) -> tuple[set[Coordinates], set[Coordinates]]:
    """Return the readers of the attempt, and those that are waited for, that nothing was heard from for long."""
    return set(_silent(view, now)), _unheard(view, now)


def _silent(view: StreamView, now: float) -> Iterator[Coordinates]:
    """Yield those of the attempt. While the stream is made again a connected reader has nothing to say."""
    if view.phase is not Phase.ENDED:
        for reader in view.readers.values():
            quiet = not reader.said_bye and now - reader.heard_s > view.spec.rejoin_after_s
            if quiet and (view.phase is not Phase.RESTORING or not reader.peer):
                yield reader.at


def _unheard(view: StreamView, now: float) -> set[Coordinates]:
    """Return whom those that have said HELLO wait for, and who was not rejected."""
    met = view.phase in (Phase.RESTORING, Phase.WELCOMING)
    return set() if met or view.waited_s(now) <= view.spec.rejoin_after_s else set(view.sought)
