"""The steps a stream holds: which are made, which may be made next, where the stream ends.

Step s is made when step s - ``steps_ahead`` is acknowledged by every reader, so a stream holds at most
``steps_ahead`` + 1 steps, and the slowest reader's next micro-batch always exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from packhorse_service.framing import FramedStep

__all__ = ["Supply"]


NOWHERE = -1


@dataclass(slots=True)
class Supply:
    steps_ahead: int
    steps: dict[int, FramedStep] = field(default_factory=dict)
    next_step: int = 0  # the next to be asked for
    making: bool = False
    end: int | None = None  # the step at which END stands

    def holds(self, step: int) -> bool:
        """Whether the stream can go on from ``step`` without being made again."""
        return step in self.steps or step in (self.next_step, self.end)

    def lose(self) -> None:
        """Nobody knows where the pipeline stands: whoever comes next has it restored."""
        self.reset(NOWHERE)

    def reset(self, step: int) -> None:
        """The stream is made again from ``step`` on."""
        self.steps.clear()
        self.next_step, self.making, self.end = step, False, None

    def release(self, before: int) -> None:
        """Every reader has taken the steps before this one."""
        for step in [s for s in self.steps if s < before]:
            del self.steps[step]

    def ask(self, lowest: int) -> int | None:
        """The step to make now, if one may be made: ``lowest`` is the step the slowest reader stands in."""
        if (
            self.next_step == NOWHERE
            or self.making
            or self.end is not None
            or self.next_step >= lowest + self.steps_ahead
        ):
            return None
        self.making = True
        return self.next_step

    def made(self, step: FramedStep | None) -> None:
        """The step asked for; ``None`` where the stream has ended before it."""
        self.making = False
        if step is None:
            self.end = self.next_step
        else:
            self.steps[step.step] = step
            self.next_step = step.step + 1
