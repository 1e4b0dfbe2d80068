"""Connections that break in every way: the ranks come back to where they stood."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.job import Job, job_of
from tests.faults.processes import Launcher
from tests.faults.relay import Way
from tests.faults.scenarios import cut_then_killed, one_rank_lags
from tests.faults.truth import Truth


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Four ranks, two of which share each row."""
    layout = {"data": 2, "context": 2}
    return Truth.written(tmp_path_factory.mktemp("sliced"), 24, layout=layout, contract={"partition": "zigzag"})


@pytest.fixture
def four(sliced: Truth, launcher: Launcher) -> Iterator[Job]:
    with job_of(sliced, launcher) as job:
        yield job


def test_connections_that_are_cut_half_open_or_blocked_one_way(four: Job) -> None:
    """All at once, a fault for each rank; two ends do not learn of theirs but by heartbeats."""
    four.start("--delay", "0.01")
    four.wait_taken(9)
    broken = {rank: relay.link for rank, relay in four.relays.items()}
    broken[0].cut(Way.READER)  # the server still believes in it
    broken[1].cut(Way.SERVER)  # the reader still believes in it
    broken[2].block(Way.READER)
    broken[3].block(Way.SERVER)
    four.finish()
    assert all(four.relays[rank].link is not link for rank, link in broken.items())


def test_one_rank_lags_and_the_other_waits_for_it(job: Job) -> None:
    one_rank_lags(job)


def test_a_slow_network(job: Job) -> None:
    for relay in job.relays.values():
        relay.pause_s = 0.01
    job.start()
    job.finish()


def test_a_connection_that_is_cut_again_and_again(job: Job) -> None:
    job.start("--delay", "0.01")
    for taken in range(5, 30, 5):
        for tap in job.taps:
            tap.wait_taken(taken + tap.rank)
            job.relays[tap.rank].cut()
    job.finish()


def test_cut_with_rows_on_the_way_then_the_server_killed(job: Job) -> None:
    cut_then_killed(job)
