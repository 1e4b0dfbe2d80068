"""Buffer of steps: which are made, which may be made next, where the stream or a pass over it ends.

Step s is made when step s - ``steps_ahead`` is acknowledged by every reader, so a stream holds at most
``steps_ahead`` + 1 steps, and the slowest reader's next micro-batch always exists. An END counts as a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from packhorse.contract.position import Position
from packhorse_service.framing import FramedStep

__all__ = ["StepBuffer"]


UNKNOWN = -1


@dataclass(slots=True)
class StepBuffer:
    """Steps of a stream that are made and not taken by every reader yet, and which may be made next."""

    steps_ahead: int
    steps: dict[int, FramedStep] = field(default_factory=dict)
    ends: dict[int, bytes] = field(default_factory=dict)  # where an END stands -> the snapshot behind it
    next_step: int = 0  # the next to be asked for
    in_progress: bool = False  # whether a step that was asked for is being made
    restoring: bool = False  # whether the pipeline is on its way to where ``next_step`` says
    generation: int = 0  # counts resets: what was asked for in an earlier one is not this stream's any more
    final_end: int | None = None  # where the END stands that nothing follows

    def holds(self, step: int) -> bool:
        """Return whether the stream can go on from ``step`` without being made again."""
        return step in self.steps or step in self.ends or step == self.next_step

    def invalidate(self) -> None:
        """Drop all: nobody knows where the pipeline stands, and whoever comes next has it restored."""
        self._reset(UNKNOWN)

    def restore(self, step: int) -> None:
        """Drop all: the stream is to be made again from ``step`` on."""
        self._reset(step)
        self.restoring = True

    def _reset(self, step: int) -> None:
        self.steps.clear()
        self.ends.clear()
        self.next_step, self.in_progress, self.restoring, self.final_end = step, False, False, None
        self.generation += 1

    def release(self, before: int) -> int:
        """Drop what is before a step, which every reader has taken; return how many steps that were, ends aside."""
        for end in [step for step in self.ends if step < before]:
            del self.ends[end]
        taken = [step for step in self.steps if step < before]
        for step in taken:
            del self.steps[step]
        return len(taken)

    def count_between(self, begin: Position, end: Position, num_microbatches: int) -> int:
        """Return how much a reader gets from ``begin`` on, before ``end``: micro-batches, an END counting as one."""
        ends = sum(begin.step <= step < end.step for step in self.ends) if self.ends else 0
        return (end.step - begin.step - ends) * num_microbatches + ends + end.index - begin.index

    def claim_next(self, lowest: int) -> int | None:
        """Return the step to make now, if one may be made: ``lowest`` is the step the slowest reader stands in."""
        if (
            self.next_step == UNKNOWN
            or self.in_progress
            or self.final_end is not None
            or self.next_step >= lowest + self.steps_ahead
        ):
            return None
        self.in_progress = True
        return self.next_step

    def add(self, step: FramedStep | None, snapshot_after: bytes = b"") -> None:
        """Take the step that was asked for; ``None`` where END stands in its place.

        ``snapshot_after`` is the snapshot behind END, where another pass follows.
        """
        self.in_progress = False
        if step is not None:
            self.steps[step.step] = step
        else:
            self.ends[self.next_step] = snapshot_after
            self.final_end = None if snapshot_after else self.next_step
        self.next_step += self.final_end is None
