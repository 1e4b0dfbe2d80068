"""What the readers of a running attempt get next: one message each in turn, up to their windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from packhorse.microbatch import Position
from packhorse.wire import Batch, End
from packhorse_service.attempt import Reader, Roster
from packhorse_service.effects import Effect, Send
from packhorse_service.supply import Supply

__all__ = ["Delivery"]


@dataclass(slots=True)
class Delivery:
    """From the steps that are made to the readers of one attempt; moves ``Reader.sent``.

    A reader that has room for more than is made is noted in ``Roster.hungry``, so that a step that is made
    later need not look at readers whose windows are full.
    """

    stream: str
    attempt: bytes
    num_microbatches: int
    roster: Roster
    supply: Supply

    def to(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        """In turn, so that no reader has its whole window before another has its next micro-batch."""
        sends: list[Effect] = []
        due = deque(readers)
        while due:
            reader = due.popleft()
            send = self._next_for(reader)
            if send is not None:
                sends.append(send)
                due.append(reader)
                continue
            owed = reader.sent == reader.acked and self.supply.last != reader.sent.step - 1
            reader.owed_since_s = (reader.owed_since_s or now) if owed else None
        return sends

    def _next_for(self, reader: Reader) -> Send | None:
        at = reader.sent
        in_flight = self.supply.between(reader.acked, at, self.num_microbatches)
        if not reader.peer or in_flight >= reader.window:
            return None
        step = self.supply.steps.get(at.step)
        if step is None:
            return self._end_for(reader)
        view = step.of(reader.view)[at.index]
        reader.sent = after = at.after(self.num_microbatches)
        batch = Batch(stream=self.stream, attempt=self.attempt, floor=self.roster.floor, body=view.body)
        return Send(reader.peer, batch, (view.payload,) if after.index else (view.payload, step.snapshot))

    def _end_for(self, reader: Reader) -> Send | None:
        """An END counts as a step of one."""
        at = reader.sent
        behind = self.supply.ends.get(at.step)
        if behind is None:
            self.roster.hungry[reader.at] = reader
            return None
        reader.sent = Position(at.step + 1, 0)
        end = End(stream=self.stream, attempt=self.attempt, position=at)
        return Send(reader.peer, end, (behind,) if behind else ())
