"""What the collector makes of a real stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packhorse_service.monitoring.log_events import LogEvent, log_events
from packhorse_service.monitoring.prometheus import READERS_SHOWN, registry_of
from packhorse_service.monitoring.status import ReaderStatus, ServerStatus, Stall, StreamPhase, StreamStatus
from packhorse_service.protocol.diagnosis import Cause, ReaderState
from tests.service.monitoring.collected_stream import CollectedStream, status_after


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[CollectedStream]:
    collected = CollectedStream(tmp_path)
    yield collected
    collected.close()


def test_counts_are_those_of_the_rows_that_were_made(collected: CollectedStream) -> None:
    collected.make(3)
    (stream,) = collected.collector.collect(5.0, 0).streams
    rows = [row for step in collected.session.buffer.steps.values() for of_rank in step.rows for row in of_rank]
    assert (stream.steps, stream.microbatches) == (3, len(rows)) == (3, 12)
    assert stream.tokens == sum(row.num_tokens for row in rows)
    assert stream.loss_tokens == sum(row.num_loss_tokens for row in rows)
    assert stream.slots == sum(row.width for row in rows) == 12 * 64
    (source,) = stream.sources
    assert source.packed == stream.tokens
    assert source.share == source.weight == 1.0


def test_packs_are_pictured_as_they_are(collected: CollectedStream) -> None:
    collected.make(1)
    (stream,) = collected.collector.collect(5.0, 0).streams
    (step,) = collected.session.buffer.steps.values()
    for pack in stream.packs:
        row = step.rows[pack.rank][pack.index]
        assert sum(pack.lengths) == row.num_tokens
        assert all(padded >= length for length, padded in zip(pack.lengths, pack.padded_lengths, strict=True))
        assert sum(pack.padded_lengths) <= pack.width == 64
    assert 0 < stream.useful_fill <= stream.fill <= 1


def test_a_server_that_has_made_nothing_is_not_ready(collected: CollectedStream) -> None:
    assert not collected.collector.collect(1.0, 0).ready
    collected.make(1)
    assert collected.collector.collect(2.0, 0).ready


def test_the_past_is_kept_and_grows_older(collected: CollectedStream) -> None:
    for second in range(1, 4):
        status = collected.collector.collect(float(second), 0)
    assert [moment.age_s for moment in status.streams[0].history] == [2.0, 1.0, 0.0]


def test_a_status_survives_its_way_to_another_process(collected: CollectedStream) -> None:
    collected.make(2)
    status = collected.collector.collect(5.0, 3)
    assert msgspec.json.decode(msgspec.json.encode(status), type=ServerStatus) == status


def stream_with(readers: int) -> StreamStatus:
    (stream,) = status_after(steps=1).streams
    many = tuple(
        ReaderStatus(rank=rank, at=f"dp{rank}", state=ReaderState.RECEIVING, lag=rank) for rank in range(readers)
    )
    return replace(stream, readers=many)


@pytest.mark.parametrize(("readers", "shown"), [(4, 4), (READERS_SHOWN, READERS_SHOWN), (READERS_SHOWN + 1, 0)])
def test_series_of_readers_are_bounded_and_the_worst_is_always_shown(readers: int, shown: int) -> None:
    status = replace(status_after(steps=1), streams=(stream_with(readers),))
    families = {family.name: family.samples for family in registry_of(lambda: status).collect()}
    assert len(families["packhorse_reader_lag_microbatches"]) == shown
    assert [sample.value for sample in families["packhorse_reader_lag_microbatches_max"]] == [readers - 1]


# What is logged ----------------------------------------------------------------------------------------------


def between(before: dict[str, Any], after: dict[str, Any]) -> list[LogEvent]:
    status = status_after(steps=1)
    (stream,) = status.streams
    return list(
        log_events(
            replace(status, streams=(replace(stream, **before),)), replace(status, streams=(replace(stream, **after),))
        )
    )


def with_states(*states: ReaderState) -> dict[str, Any]:
    readers = tuple(
        ReaderStatus(rank=rank, at=f"dp{rank}", state=state, why="no word from it") for rank, state in enumerate(states)
    )
    return {"readers": readers, "phase": StreamPhase.RUNNING}


def test_nothing_happened_nothing_is_said() -> None:
    assert between({}, {}) == []


def test_an_attempt_that_runs_is_an_event() -> None:
    (change,) = between({"phase": StreamPhase.WELCOMING}, {"phase": StreamPhase.RUNNING, "attempt": 3})
    assert (change.level, change.fields["attempt"], change.fields["stream"]) == (logging.INFO, 3, "train")


@pytest.mark.parametrize(
    ("before", "after", "level", "text"),
    [
        (ReaderState.WAITING, ReaderState.LOST, logging.WARNING, "lost rank 1 (dp1): no word from it"),
        (ReaderState.ABSENT, ReaderState.LOST, logging.WARNING, "lost rank 1 (dp1): no word from it"),
        (ReaderState.LOST, ReaderState.RECEIVING, logging.INFO, "rank 1 (dp1) is back"),
        (ReaderState.TRAINING, ReaderState.LEFT, logging.INFO, "rank 1 (dp1) has left"),
    ],
)
def test_readers_that_come_and_go_are_named(before: ReaderState, after: ReaderState, level: int, text: str) -> None:
    states = [with_states(ReaderState.RECEIVING, state) for state in (before, after)]
    (change,) = between(*states)
    assert (change.level, change.text) == (level, text)


def test_many_readers_lost_at_once_are_one_line() -> None:
    (change,) = between(with_states(*[ReaderState.RECEIVING] * 100), with_states(*[ReaderState.LOST] * 100))
    assert "and 92 more" in change.text
    assert change.fields["readers"] == 100


def stalled(since_s: float, cause: Cause = Cause.LOADING) -> dict[str, Any]:
    return {"stall": Stall(cause=cause, why="the next step waits for shard 'x'", since_s=since_s, waiting=2)}


def test_a_stall_is_told_once_when_it_has_lasted_and_when_it_is_over() -> None:
    assert between({"stall": None}, stalled(3.0)) == []
    (begun,) = between(stalled(9.5), stalled(10.5))
    assert (begun.level, begun.fields["cause"]) == (logging.WARNING, "loading")
    assert begun.text == "stalled: the next step waits for shard 'x'"
    assert between(stalled(20.0), stalled(21.0)) == []
    (ended,) = between(stalled(21.0), {"stall": None})
    assert (ended.text, ended.fields["seconds"]) == ("the stall is over", 21.0)
    assert between(stalled(3.0), {"stall": None}) == []
