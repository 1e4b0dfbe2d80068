"""The oracle: what the ranks of a run printed is what an undisturbed run delivers, once, whatever was killed.

Rows are keyed by (attempt, step, index). Within an attempt nothing comes twice and nothing is passed over; a
later attempt's rows replace the earlier ones where they overlap; together they are the whole stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from packhorse import Position
from tests.faults.processes import RunningTap
from tests.faults.truth import Truth

Row = dict[str, Any]


def position_of(row: Row) -> Position:
    return Position(row["step"], row["index"])


def check_served_right(truth: Truth, taps: Iterable[RunningTap]) -> None:
    """Every row that any process ever printed is the one of an undisturbed run at this rank and position."""
    for tap in taps:
        for row in tap.rows():
            at, expected = position_of(row), truth.digests[tap.rank]
            assert row["local_digest"] == expected.get(at), (
                f"rank {tap.rank}, attempt {row['attempt']}: the row at {tuple(at)} is not that of an undisturbed run"
            )


def check_consecutive(truth: Truth, taps: Iterable[RunningTap]) -> None:
    """A process is handed consecutive positions, all of one attempt."""
    for tap in taps:
        rows = tap.rows()
        assert len({row["attempt"] for row in rows}) <= 1, f"rank {tap.rank} was handed rows of several attempts"
        for before, after in pairwise(rows):
            expected = position_of(before).after(truth.num_microbatches)
            assert position_of(after) == expected, f"rank {tap.rank}: {position_of(after)} behind {position_of(before)}"


def check_rows(truth: Truth, taps: Iterable[RunningTap]) -> dict[int, dict[Position, Row]]:
    """The rows that stand at the end, of every rank: all of an undisturbed run's, and no others.

    ``taps``: the processes that made the run, in the order in which they were started.
    """
    rows: dict[int, dict[Position, Row]] = {rank: {} for rank in truth.digests}
    for tap in taps:
        check_served_right(truth, [tap])
        check_consecutive(truth, [tap])
        rows[tap.rank] |= {position_of(row): row for row in tap.rows()}
    for rank, expected in truth.digests.items():
        missing = sorted(expected.keys() - rows[rank].keys())
        assert not missing, f"rank {rank} was never handed {[tuple(at) for at in missing]}"
    return rows


def check_whole_run(truth: Truth, taps: Iterable[RunningTap]) -> None:
    """The rows are those of an undisturbed run, and hold every target of the shards once."""
    rows = check_rows(truth, taps)
    delivered = Counter(
        tuple(pair) for of_rank in rows.values() for row in of_rank.values() for pair in row.get("pairs", ())
    )
    assert delivered == truth.stored, f"lost {truth.stored - delivered}, repeated {delivered - truth.stored}"


def check_same_attempts(jobs: Sequence[Sequence[RunningTap]]) -> None:
    """The ranks of a job, started together, were in one attempt, and the next job in another."""
    names: list[str] = []
    for job in jobs:
        attempts = {row["attempt"] for tap in job for row in tap.rows()}
        assert len(attempts) <= 1, f"ranks that were started together met in attempts {attempts}"
        names += attempts
    assert len(set(names)) == len(names), "two jobs share an attempt"
