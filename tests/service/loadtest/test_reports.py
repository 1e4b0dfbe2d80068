"""What workers report becomes figures of each second; what they are told arrives whole, however the pipe cuts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.loadtest.ranks.command_reader import CommandReader
from packhorse_service.loadtest.ranks.rank_timers import RankTimers
from packhorse_service.loadtest.ranks.wait_histogram import bin_of
from packhorse_service.loadtest.ranks.worker_messages import COMMANDS, Command, Leave, Measure, Ready, WorkerProgress
from packhorse_service.loadtest.run.interval_sampler import INTERVAL_S, IntervalSampler
from packhorse_service.loadtest.run.usage import Usage
from packhorse_service.loadtest.run.worker_reports import WorkerReports
from tests.service.loadtest.test_outcome import of_rank, result

PROGRESS = WorkerProgress(
    at_s=10.0,
    connected=4,
    welcomed=4,
    started=4,
    ended=0,
    failed=0,
    waiting=1,
    micro_batches=100,
    tokens=1000,
    wire_bytes=10**9,
    waits={bin_of(0.5): 2},
    waiting_for={"loading": 1000, "loading: rank 1": 400},
)


def reported(*progress: WorkerProgress) -> WorkerReports:
    reports = WorkerReports()
    for number, each in enumerate(progress):
        reports.receive(number, each)
    return reports


class TestReports:
    def test_the_newest_of_each_worker_counts_and_all_are_summed(self) -> None:
        reports = reported(PROGRESS, PROGRESS)
        reports.receive(1, replace(PROGRESS, tokens=5000))
        assert reports.total("tokens") == 1000 + 5000
        assert reports.waited_for() == {"loading": 2000, "loading: rank 1": 800}

    def test_waits_are_taken_once_each_also_where_a_worker_reports_twice(self) -> None:
        reports = reported(PROGRESS)
        reports.receive(0, PROGRESS)
        assert reports.take_waits().bins == {bin_of(0.5): 4}
        assert not reports.take_waits().bins

    def test_one_failed_rank_is_seen_in_progress_and_in_a_result(self) -> None:
        assert not reported(PROGRESS).rank_failed
        assert reported(PROGRESS, replace(PROGRESS, failed=1)).rank_failed
        reports = reported(PROGRESS)
        reports.receive(0, replace(result(of_rank(0, 1)), errors={"StallTimeout": 1}))
        assert reports.rank_failed

    def test_a_worker_is_ready_once_it_says_so(self) -> None:
        reports = reported(PROGRESS)
        assert not reports.ready
        reports.receive(3, Ready())
        assert reports.ready == {3}


def server(cpu_s: float) -> Usage:
    return Usage(cpu_s=cpu_s, memory_bytes=1, open_files=1)


class TestIntervals:
    def test_a_sample_is_of_the_time_since_the_last_one_by_the_workers_own_clocks(self) -> None:
        sampler = IntervalSampler(reported(PROGRESS, replace(PROGRESS, at_s=50.0)), begin_s=100.0)
        first = sampler.sample(101.0, server(1.0), None)
        assert (first.at_s, first.tokens_per_s, first.server_cores) == (1.0, 0.0, None), "nothing to compare with yet"
        sampler.reports.receive(0, replace(PROGRESS, at_s=12.0, tokens=2000))
        sampler.reports.receive(1, replace(PROGRESS, at_s=51.0, tokens=1100))
        second = sampler.sample(103.0, server(4.0), None)
        assert second.tokens_per_s == pytest.approx(1000 / 2 + 100 / 1)
        assert second.server_cores == pytest.approx(3 / 2)

    @pytest.mark.parametrize("passed", [0.0, -1.0])
    def test_where_no_time_has_passed_there_is_no_rate(self, passed: float) -> None:
        sampler = IntervalSampler(reported(PROGRESS), begin_s=0.0)
        sampler.sample(1.0, server(1.0), None)
        sampler.reports.receive(0, replace(PROGRESS, at_s=10.0 + passed, tokens=9999))
        again = sampler.sample(1.0 + passed, server(2.0), None)
        assert (again.tokens_per_s, again.server_cores) == (0.0, None)

    def test_what_was_named_most_is_of_this_time_alone(self) -> None:
        sampler = IntervalSampler(reported(PROGRESS), begin_s=0.0)
        assert sampler.sample(1.0, None, None).waited_for == "loading"
        assert not sampler.sample(2.0, None, None).waited_for, "nobody has waited since"
        sampler.reports.receive(0, replace(PROGRESS, waiting_for={"loading": 1000, "slow readers": 250}))
        assert sampler.sample(3.0, None, None).waited_for == "slow readers"

    def test_a_second_is_due_from_the_first_report_to_the_first_result(self) -> None:
        sampler = IntervalSampler(WorkerReports())
        assert not sampler.due(5.0), "nothing is reported yet"
        sampler.reports.receive(0, PROGRESS)
        assert sampler.due(5.0)
        assert sampler.sample(5.0, None, None).at_s < 0, "what is measured has not begun"
        assert not sampler.due(5.0 + INTERVAL_S / 2)
        assert sampler.due(5.0 + INTERVAL_S)
        sampler.reports.receive(0, result(of_rank(0, 1)))
        assert not sampler.due(1e9)


@dataclass
class Timed:
    """A connection, as far as timers ask it."""

    due: float = inf

    @property
    def rank(self) -> SimpleNamespace:
        return SimpleNamespace(due=self.due)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*map(float, range(6)), inf])), max_size=30))
def test_timers_give_each_rank_once_at_the_time_it_asked_for_last(changes: list[tuple[int, float]]) -> None:
    connections: list[Any] = [Timed() for _ in range(4)]
    timers = RankTimers(connections)
    for number, due in changes:
        connections[number].due = due
        timers.schedule(number)
    wanted = sorted((each.due, number) for number, each in enumerate(connections) if each.due < inf)
    assert timers.next_due <= min((due for due, _ in wanted), default=inf), "nobody is slept past"
    assert list(timers.due(2.0)) == [each for each in wanted if each[0] <= 2.0]
    assert list(timers.due(9.0)) == [each for each in wanted if each[0] > 2.0]
    assert not list(timers.due(9.0))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)


COMMANDED: list[Command] = [Measure(from_s=1.0, until_s=2.0, stop_s=3.0, resume_s=4.0), Leave()]


def lines_of(commands: list[Command]) -> bytes:
    return b"".join(COMMANDS.dump_json(command) + b"\n" for command in commands)


class TestCommands:
    @pytest.mark.parametrize("size", [1, 7, 1000])
    def test_commands_arrive_whole_and_in_order_however_they_are_cut(self, pipe: tuple[int, int], size: int) -> None:
        reader, told, read = CommandReader(pipe[0]), lines_of(COMMANDED), list[Command]()
        for begin in range(0, len(told), size):
            os.write(pipe[1], told[begin : begin + size])
            read += reader.read()
        assert read == COMMANDED
        assert not reader.closed
        os.close(pipe[1])
        assert not reader.read()
        assert reader.closed

    def test_the_first_takes_nothing_of_what_is_behind_it(self, pipe: tuple[int, int]) -> None:
        os.write(pipe[1], lines_of(COMMANDED))
        os.close(pipe[1])
        reader = CommandReader(pipe[0])
        assert reader.first() == COMMANDED[0]
        assert reader.read() == COMMANDED[1:]
