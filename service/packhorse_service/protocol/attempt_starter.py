"""Start of an attempt: from the HELLOs of all readers to the ACK of the last WELCOME."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from packhorse.errors import ContractError
from packhorse.wire.digest import digest_of
from packhorse.wire.limits import ATTEMPT_BYTES, NO_ATTEMPT
from packhorse.wire.messages import Ack, ErrorCode, Frames, GetSnapshot, Snapshot
from packhorse_service.protocol.attempt import Attempt, Phase, SnapshotRequest
from packhorse_service.protocol.delivery import Delivery
from packhorse_service.protocol.effects import Effect, Restore, Send
from packhorse_service.protocol.readers import Reader, ReaderTable
from packhorse_service.protocol.rejection import Rejections, rank_name
from packhorse_service.protocol.rendezvous import PendingHello, Quorum, Rendezvous
from packhorse_service.protocol.step_buffer import StepBuffer

__all__ = ["AttemptStarter"]


@dataclass(slots=True)
class AttemptStarter:
    """Brings the stream to where all readers stand, and welcomes them. Methods return the effects to carry out."""

    attempt: Attempt
    rendezvous: Rendezvous
    rejections: Rejections
    buffer: StepBuffer
    delivery: Delivery
    _buffered_for: bytes = NO_ATTEMPT  # whose steps the buffer holds: another attempt may have packed otherwise

    def begin(self, quorum: Quorum, now: float) -> list[Effect]:
        """Begin an attempt: welcome its readers where the stream stands where they do, else bring it there first."""
        attempt = self.attempt
        attempt.number += not quorum.attempt or quorum.attempt != attempt.name
        attempt.name = quorum.attempt or secrets.token_bytes(ATTEMPT_BYTES)
        attempt.readers = ReaderTable(quorum.hellos, attempt.spec, now)
        attempt.snapshot_request = None
        attempt.enter(Phase.RESTORING, now)
        lowest = quorum.lowest
        # Elsewhere than at the beginning, another attempt may have other data in mind: its snapshot tells.
        same = quorum.attempt != NO_ATTEMPT and quorum.attempt == self._buffered_for
        if self.buffer.holds(lowest.step) and (same or lowest.step == 0):
            if self.buffer.restoring:
                return []  # it is on its way to just there
            return self.delivery.compare(self.buffer.steps.values(), now) or self._welcome_all(now)
        return self._restore(0, None) if quorum.compared_from == 0 else self._request_snapshot(quorum, now)

    def _restore(self, step: int, snapshot: bytes | None) -> list[Effect]:
        self.buffer.restore(step)
        self.attempt.held_failure = None  # whether what could not be made is needed there shows itself
        self._buffered_for = self.attempt.name
        return [Restore(self.buffer.generation, snapshot, step)]

    def _request_snapshot(self, quorum: Quorum, now: float) -> list[Effect]:
        try:
            request = self.attempt.snapshot_request = SnapshotRequest(*quorum.newest_snapshot())
        except ContractError as error:
            return self._refuse(str(error), now)
        self.buffer.invalidate()  # a restore that is under way is not this attempt's
        stream = self.attempt.spec.stream
        return [Send(request.peer, GetSnapshot(stream=stream, step=request.step, digest=request.digest))]

    def snapshot(self, peer: bytes, message: Snapshot, extra: Frames, _now: float) -> list[Effect]:
        """Take the snapshot that was asked for, and have the stream made again from it."""
        snapshot = bytes(extra[0])
        if self.attempt.snapshot_request != (message.step, digest_of(snapshot), peer):
            return [self.attempt.error(peer, ErrorCode.HELLO, "this is not the snapshot that was asked for")]
        self.attempt.snapshot_request = None
        return self._restore(message.step, snapshot)

    def restored(self, generation: int, now: float) -> list[Effect]:
        """Welcome all: the stream stands where ``Restore`` asked."""
        if generation != self.buffer.generation:
            return []
        self.buffer.restoring = False
        return self._welcome_all(now)

    def not_restored(self, generation: int, message: str, now: float) -> list[Effect]:
        """Refuse the attempt: the snapshot is not one of this stream."""
        return self._refuse(message, now) if generation == self.buffer.generation else []

    def _refuse(self, message: str, now: float) -> list[Effect]:
        """Tell these readers that nothing can be made for them, and wait for others."""
        readers = list(self.attempt.readers)
        self.attempt.dissolve()
        self.attempt.name = NO_ATTEMPT
        self.rendezvous.reset()
        self.buffer.invalidate()
        self.attempt.enter(Phase.FORMING, now)
        return [self.attempt.error(reader.peer, ErrorCode.FAILED, message, fatal=True) for reader in readers]

    def _welcome_all(self, now: float) -> list[Effect]:
        self.attempt.enter(Phase.WELCOMING, now)
        self._buffered_for = self.attempt.name
        for reader in self.attempt.readers:
            reader.heard_s = now
        return [*(self.welcome(reader) for reader in self.attempt.readers), *self.delivery.ask_for_step()]

    def welcome(self, reader: Reader) -> Send:
        """Welcome one reader of this attempt, at its position."""
        return Send(reader.peer, self.attempt.spec.welcome(self.attempt.name, reader.acked, reader.warnings))

    def answer(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        """Run, and send, once all have answered their WELCOME."""
        reader = self.attempt.heard(peer, message, now)
        if reader is None:
            return self.delivery.ask_for_hello(peer)
        readers = self.attempt.readers
        if not readers.mark_answered(reader):
            return []
        self.attempt.enter(Phase.RUNNING, now)
        clients = {reader.client for reader in readers}
        # A process that has met the others stays, whoever has claimed its rank since: that one waits, and ends nobody.
        replaced = (pending for pending in self.rendezvous.replaced() if pending.hello.client not in clients)
        out = [self._tell_replaced(pending) for pending in replaced]
        self.rendezvous.attempt_started(self.attempt.name, clients)
        self.rejections.clear()
        return [*out, *self.delivery.pump(readers, now)]

    def _tell_replaced(self, pending: PendingHello) -> Send:
        name = rank_name(self.attempt.spec.layout, pending.hello.reader)
        text = f"another process has claimed {name}; each reader connects once: check the ranks"
        return self.attempt.error(pending.peer, ErrorCode.FAILED, text, fatal=True)
