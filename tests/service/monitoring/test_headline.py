"""What a status comes down to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from packhorse_service.monitoring.headline import HIGHLIGHTED, headline, highlighted_ranks, tokens_per_s, with_headline
from packhorse_service.monitoring.status import HistoryPoint, Level, ServerStatus, Stall, StreamPhase, StreamStatus
from packhorse_service.protocol.diagnosis import Cause, ReaderState
from tests.service.monitoring.statuses import a_reader, a_stall, a_stream, statuses

FORMING, FAILED = StreamPhase.FORMING, StreamPhase.FAILED


def absent(count: int, of: int) -> dict[str, Any]:
    states = [ReaderState.ABSENT] * count + [ReaderState.FORMING] * (of - count)
    return {"readers": tuple(a_reader(rank, of, state=state) for rank, state in enumerate(states))}


@pytest.mark.parametrize(
    ("stream", "level", "said"),
    [
        (a_stream(), Level.GOOD, "training: step 1,204, 16.2 M tokens/s, useful fill 98.9%"),
        (
            a_stream(**a_stall()),
            Level.BAD,
            "stalled by a slow peer: the stream waits for dp0·cp1·tp0·pp0. 3 readers have waited for 12 s",
        ),
        (
            a_stream(stall=Stall(cause=Cause.STARTUP, why="3 of 4 readers are here", since_s=65, waiting=1)),
            Level.NOTICE,
            "starting: 3 of 4 readers are here. 1 reader has waited for 1 min 5 s",
        ),
        (
            a_stream(phase=StreamPhase.FORMING, **absent(1, 4)),
            Level.NOTICE,
            "waiting for readers: 3 of 4 readers have come",
        ),
        (a_stream(phase=StreamPhase.WELCOMING), Level.NOTICE, "starting: attempt 1 begins at step 1,204"),
        (a_stream(phase=StreamPhase.ENDED), Level.GOOD, "ended: 4 readers took all 1,204 steps"),
        (
            a_stream(phase=StreamPhase.FAILED, failure="shard 'a.tar' is gone"),
            Level.BAD,
            "failed: shard 'a.tar' is gone",
        ),
    ],
)
def test_a_headline_says_in_words_whether_all_is_well(stream: StreamStatus, level: Level, said: str) -> None:
    found = headline(stream)
    assert (found.level, f"{found.word}: {found.sentence}") == (level, said)


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_of_a_stall_has_words(cause: Cause) -> None:
    said = headline(a_stream(**a_stall(cause)))
    assert said.level is (Level.NOTICE if cause is Cause.STARTUP else Level.BAD)
    assert "_" not in said.word


def test_throughput_is_the_mean_of_the_last_minute() -> None:
    past = [
        HistoryPoint(age_s=age, tokens_per_s=1200.0 * (age % 10 == 0), fill=0, waiting=0, held=0)
        for age in range(120, 0, -1)
    ]
    assert tokens_per_s(past) == 120
    assert tokens_per_s([]) == 0


@given(statuses())
def test_every_status_has_a_headline_and_keeps_all_else(status: ServerStatus) -> None:
    worded = with_headline(status)
    for stream, before in zip(worded.streams, status.streams, strict=True):
        assert set(stream.notable) <= {reader.rank for reader in stream.readers}
        assert (stream.headline.level is Level.BAD) >= (stream.failure is not None)
        assert replace(stream, headline=before.headline, notable=before.notable) == before


def test_the_lost_come_first_then_the_missing_then_those_furthest_behind_then_who_waits_longest() -> None:
    readers = [
        a_reader(0, state=ReaderState.LEFT),
        a_reader(1, state=ReaderState.WAITING, waits_s=3, lag=0),
        a_reader(2, state=ReaderState.WAITING, waits_s=4, lag=0),
        a_reader(3, state=ReaderState.TRAINING, lag=1),
        a_reader(4, state=ReaderState.TRAINING, lag=5),
        a_reader(5, state=ReaderState.ABSENT),
        a_reader(6, state=ReaderState.LOST, silence_s=8),
        a_reader(7, state=ReaderState.LOST, silence_s=9),
    ]
    assert highlighted_ranks(readers) == (7, 6, 5, 4, 3, 2, 1, 0)


def test_of_a_thousand_readers_a_few_are_named_and_the_one_that_all_wait_for_is_the_first() -> None:
    found = highlighted_ranks(a_stream(1024, **a_stall(readers=1024)).readers)
    assert len(found) == HIGHLIGHTED
    assert found[0] == 1
