"""What the readers of a running attempt get next: one message each in turn, up to their windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from packhorse.contract.position import Position
from packhorse.wire.messages import Batch, End
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader, ReaderTable
from packhorse_service.protocol.step_buffer import StepBuffer

__all__ = ["Sender"]


@dataclass(slots=True)
class Sender:
    """From the steps that are made to the readers of one attempt; moves ``Reader.sent``.

    A reader that has room for more than is made is noted in ``ReaderTable.waiting_for_step``, so that a step that is
    made later need not look at readers whose windows are full.
    """

    stream: str
    attempt: bytes
    num_microbatches: int
    readers: ReaderTable
    buffer: StepBuffer

    def send_to(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        """In turn, so that no reader has its whole window before another has its next micro-batch."""
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
        """As much of what this reader gets next as its window has room for."""
        in_flight = self.buffer.count_between(reader.acked, reader.sent, self.num_microbatches)
        return islice(self._next_frames(reader), max(0, reader.window - in_flight) if reader.peer else 0)

    def _next_frames(self, reader: Reader) -> Iterator[Send]:
        """What is made, from where this reader stands on; it counts as sent when it is asked for."""
        while True:
            step = self.buffer.steps.get(reader.sent.step)
            if step is None:
                end = self._end_for(reader)
                if end is None:
                    return
                yield end
                continue
            for view in step.of(reader.view)[reader.sent.index :]:
                reader.sent = after = reader.sent.after(self.num_microbatches)
                lowest = self.readers.low_watermark
                batch = Batch(stream=self.stream, attempt=self.attempt, low_watermark=lowest, body=view.body)
                yield Send(reader.peer, batch, (view.payload,) if after.index else (view.payload, step.snapshot))

    def _end_for(self, reader: Reader) -> Send | None:
        """An END counts as a step of one."""
        at = reader.sent
        snapshot_after = self.buffer.ends.get(at.step)
        if snapshot_after is None:
            self.readers.waiting_for_step[reader.at] = reader
            return None
        reader.sent = Position(at.step + 1, 0)
        end = End(stream=self.stream, attempt=self.attempt, position=at)
        return Send(reader.peer, end, (snapshot_after,) if snapshot_after else ())
