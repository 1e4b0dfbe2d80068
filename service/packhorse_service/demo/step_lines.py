"""What a trainer rank tells the demo: a line after each step, in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from packhorse import Feed, MicroBatch
from packhorse_service.demo.packs import save_slice

__all__ = ["RankStepReport", "Reporter", "Tail", "lines_file"]

FIRST_STEPS = 2  # those in the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepReport:
    """Report of one rank after one step. Waits are seconds since the rank began."""

    rank: int
    step: int
    loss: float  # of the step, per supervised token of all ranks
    step_tokens: int  # real slots of the step, all ranks
    row_tokens: int  # real slots of this rank's rows
    row_slots: int  # width of this rank's rows; fillers are not counted
    waits: dict[str, float]  # what for -> seconds

    @classmethod
    def parse(cls, line: str) -> Self:
        return cls(**json.loads(line))


def lines_file(rank: int) -> str:
    """Name of the file that ``rank`` writes its lines into."""
    return f"rank-{rank}.jsonl"


class Reporter:
    """The rank's side: writes into ``folder``, after every step."""

    def __init__(self, folder: Path, feed: Feed) -> None:
        self._folder, self._feed = folder, feed
        self._lines = (folder / lines_file(feed.rank)).open("w", buffering=1, encoding="utf-8")

    def write(self, step: Sequence[MicroBatch], loss: float) -> None:
        """Append a line; at the first steps, save the micro-batches too."""
        real = [micro_batch for micro_batch in step if not micro_batch.filler]
        for micro_batch in real if step[0].step < FIRST_STEPS else ():
            save_slice(self._folder, self._feed.coordinates, micro_batch)
        report = RankStepReport(
            rank=self._feed.rank,
            step=step[0].step,
            loss=loss,
            step_tokens=step[0].step_tokens,
            row_tokens=sum(micro_batch.num_tokens for micro_batch in real),
            row_slots=sum(micro_batch.width for micro_batch in real),
            waits=self._feed.stats().waits,
        )
        self._lines.write(json.dumps(asdict(report)) + "\n")


class Tail:
    """Read a file that another process appends lines to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0  # bytes

    def lines(self) -> list[str]:
        """Return the lines completed since the last call; none while there is no file."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            complete = file.read().rpartition(b"\n")
        self._read += len(complete[0]) + len(complete[1])
        return complete[0].decode().splitlines()
