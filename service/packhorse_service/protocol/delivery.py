"""Delivery of a running attempt: which step is made next, what each reader is sent, and when all have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from packhorse.contract.position import Position
from packhorse.wire.messages import Ack, Batch, End, ErrorCode, Frames
from packhorse_service.framing import FramedStep
from packhorse_service.protocol.attempt import Attempt, Failing, Phase
from packhorse_service.protocol.counters import StreamCounters
from packhorse_service.protocol.effects import Effect, Make, Send
from packhorse_service.protocol.readers import Reader
from packhorse_service.protocol.rendezvous import Rendezvous
from packhorse_service.protocol.step_buffer import StepBuffer

__all__ = ["Delivery", "Sender"]


@dataclass(slots=True)
class Sender:
    """Frames for the readers of an attempt, from the steps that are made; moves ``Reader.sent``.

    A reader that has room for more than is made is noted in ``ReaderTable.waiting_for_step``, so that a step that is
    made later need not look at readers whose windows are full.
    """

    attempt: Attempt
    buffer: StepBuffer
    num_microbatches: int = field(init=False)  # of a step, for one data-parallel rank

    def __post_init__(self) -> None:
        spec = self.attempt.spec
        self.num_microbatches = spec.contract.num_microbatches(spec.layout)

    def can_stand_at(self, position: Position) -> bool:
        """Return whether a micro-batch or an END can be at this index of its step."""
        return position.index < (1 if position.step in self.buffer.ends else self.num_microbatches)

    def send_to(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        """Send what the windows of these readers have room for.

        In turn, so that no reader has its whole window before another has its next micro-batch.
        """
        sends: list[Effect] = []
        due = deque((reader, self._window_left(reader)) for reader in readers)
        while due:
            reader, frames = due.popleft()
            send = next(frames, None)
            if send is not None:
                sends.append(send)
                due.append((reader, frames))
                continue
            owed = reader.sent == reader.acked and self.buffer.final_end != reader.sent.step - 1
            reader.starved_since_s = (reader.starved_since_s or now) if owed else None
        return sends

    def _window_left(self, reader: Reader) -> Iterator[Send]:
        """Return as many of the reader's next frames as its window has room for."""
        in_flight = self.buffer.count_between(reader.acked, reader.sent, self.num_microbatches)
        return islice(self._next_frames(reader), max(0, reader.window - in_flight) if reader.peer else 0)

    def _next_frames(self, reader: Reader) -> Iterator[Send]:
        """Yield what is made, from where this reader stands on; it counts as sent when it is asked for."""
        stream, attempt, lowest = self.attempt.spec.stream, self.attempt.name, self.attempt.readers.low_watermark
        while True:
            step = self.buffer.steps.get(reader.sent.step)
            if step is None:
                end = self._end_for(reader)
                if end is None:
                    return
                yield end
                continue
            left = step.views_of(reader.view)[reader.sent.index :]
            if not left:
                return  # nobody stands there: HELLO and ACK are refused such a place
            for view in left:
                reader.sent = after = reader.sent.after(self.num_microbatches)
                batch = Batch(stream=stream, attempt=attempt, low_watermark=lowest, body=view.body)
                yield Send(reader.peer, batch, (view.payload,) if after.index else (view.payload, step.snapshot))

    def _end_for(self, reader: Reader) -> Send | None:
        """Return the END that stands where the reader does, if one does: it counts as a step of one."""
        at = reader.sent
        snapshot_after = self.buffer.ends.get(at.step)
        if snapshot_after is None:
            self.attempt.readers.waiting_for_step[reader.at] = reader
            return None
        reader.sent = Position(at.step + 1, 0)
        end = End(stream=self.attempt.spec.stream, attempt=self.attempt.name, position=at)
        return Send(reader.peer, end, (snapshot_after,) if snapshot_after else ())


@dataclass(slots=True)
class Delivery:
    """Delivery of a running attempt: steps are made, sent and acknowledged. Methods return effects, in order."""

    attempt: Attempt
    rendezvous: Rendezvous
    buffer: StepBuffer
    counters: StreamCounters
    failing: Failing
    sender: Sender = field(init=False)

    def __post_init__(self) -> None:
        self.sender = Sender(self.attempt, self.buffer)

    def acknowledge(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        """Send more to its reader; where all have left a step behind, ask for another."""
        reader = self.attempt.heard(peer, message, now)
        if reader is None:
            return self.ask_for_hello(peer)
        before = reader.acked
        if not before <= message.position <= reader.sent or not self.sender.can_stand_at(message.position):
            text = f"{tuple(message.position)} was not sent; say HELLO"
            return [self.attempt.error(peer, ErrorCode.POSITION, text)]
        watermark_moved = self.attempt.readers.acknowledge(reader, message.position)
        sends = self.sender.send_to([reader], now)
        return sends + self._go_on(now) if watermark_moved and message.position.step != before.step else sends

    def ask_for_hello(self, peer: bytes, *_: object) -> list[Effect]:
        """Ask for a HELLO: no reader of the attempt speaks on this connection. Unless it has said one since."""
        if self.rendezvous.is_waiting(peer):
            return []
        return [self.attempt.error(peer, ErrorCode.HELLO, "this connection has said no HELLO")]

    def take_step(self, generation: int, step: FramedStep | None, now: float, snapshot_after: bytes) -> list[Effect]:
        """Keep a step that was made, or an end (``None``), and send it to those that wait for it."""
        if not self._keep(generation, step, snapshot_after):
            return []
        return self.compare([step] if step else [], now) or self.pump(self.attempt.readers.take_waiting(), now)

    def hold_failure(self, generation: int, message: str, _now: float) -> list[Effect]:
        """Remember why no step could be made, for nobody as yet: who resumes elsewhere may not need it."""
        if generation == self.buffer.generation:
            self.attempt.held_failure = message
            self.buffer.invalidate()
        return []

    def not_made(self, generation: int, message: str, now: float) -> list[Effect]:
        """End the stream: the data that its readers need cannot be used."""
        return self.failing.fail(message, now) if generation == self.buffer.generation else []

    def keep_step(self, generation: int, step: FramedStep | None, _now: float, snapshot_after: bytes) -> list[Effect]:
        """Keep a step that was made, and send it to nobody."""
        self._keep(generation, step, snapshot_after)
        return []

    def _keep(self, generation: int, step: FramedStep | None, snapshot_after: bytes) -> bool:
        """Put a step into the buffer; return whether it is of the stream as it is made now."""
        if generation != self.buffer.generation:
            return False
        self.buffer.add(step, snapshot_after)
        if step is not None:
            self.counters.add_step(step.totals)
        return True

    def compare(self, steps: Iterable[FramedStep], now: float) -> list[Effect]:
        """Compare these steps with what readers say they were handed; the stream fails where they differ."""
        found = (self.attempt.readers.diverged(step, self.sender.num_microbatches) for step in steps)
        diverged = next(filter(None, found), None)
        return self.failing.fail(diverged, now, ErrorCode.DIVERGED) if diverged else []

    def ask_for_step(self) -> list[Effect]:
        """Ask for the next step, where it may be made; what every reader has taken is dropped first."""
        lowest = self.attempt.readers.low_watermark.step
        self.counters.delivered_steps += self.buffer.release(lowest)
        step = self.buffer.claim_next(lowest)
        return [] if step is None else [Make(self.buffer.generation, step)]

    def pump(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        """Send what the windows of these readers allow, who may get more than before, and go on."""
        return (self.sender.send_to(readers, now) if self.attempt.phase is Phase.RUNNING else []) + self._go_on(now)

    def _go_on(self, now: float) -> list[Effect]:
        """End, or ask for a step: the low watermark is in another step, maybe, or a step was made."""
        return self.end_if_all_have_ended(now) + self.ask_for_step()

    def end_if_all_have_ended(self, now: float) -> list[Effect]:
        """End, if everybody has taken END or said BYE: those that stay for the others' sake hear that they may go."""
        last = self.buffer.final_end
        if self.attempt.phase is not Phase.RUNNING or last is None or not self.attempt.readers.all_past(last):
            return []
        self.attempt.enter(Phase.ENDED, now)
        return [again for reader in self.attempt.readers for again in self.end_again(reader)]

    def end_again(self, reader: Reader) -> list[Effect]:
        """Send END once more to a reader of an attempt that has ended: it may leave."""
        if self.attempt.phase is not Phase.ENDED or not reader.peer or reader.said_bye:
            return []
        at = Position(self.buffer.final_end or 0, 0)
        return [Send(reader.peer, End(stream=self.attempt.spec.stream, attempt=self.attempt.name, position=at))]
