"""The figures of a load test follow from what its workers counted; tables, JSON and page show the same."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from packhorse_service.loadtest.ranks.wait_histogram import bin_of
from packhorse_service.loadtest.ranks.worker_messages import REPORTS, RankResult, WorkerResult
from packhorse_service.loadtest.report.outcome import MIB, LoadTestOutcome, as_json, outcome_of
from packhorse_service.loadtest.report.outcome_page import write_page
from packhorse_service.loadtest.report.outcome_table import show
from packhorse_service.loadtest.run.measurements import IntervalMetrics, LoadTestSetting, Measurements
from packhorse_service.loadtest.run.usage import Usage
from packhorse_service.loadtest.scenario.measured import METRICS
from packhorse_service.loadtest.scenario.thresholds import parse_threshold

ROOT = Path(__file__).parents[3]
SETTING = LoadTestSetting(
    command="packhorse loadtest --ranks 4",
    data="synthetic <data>",
    endpoint="tcp://127.0.0.1:5555",
    layout="DP4·CP1·TP1·PP1",
    readers=4,
    processes=2,
    consume_ms=20.0,
    jitter=0.2,
    slow_ranks=(1,),
    slow_factor=2.0,
    stopped_ranks=(3,),
    seconds=10.0,
    verify=True,
    machine="a machine",
    bound_bytes=400 * MIB,
)


def of_rank(rank: int, micro_batches: int, *waits: float) -> RankResult:
    bins: dict[int, int] = {}
    for wait in waits:
        bins[bin_of(wait)] = bins.get(bin_of(wait), 0) + 1
    return RankResult(
        rank=rank, micro_batches=micro_batches, waits=bins, wait_s=sum(waits), max_wait_s=max(waits, default=0.0)
    )


def result(*ranks: RankResult, **changes: object) -> WorkerResult:
    taken = sum(rank.micro_batches for rank in ranks)
    told = WorkerResult(
        ranks=ranks,
        stopped_waits={bin_of(2.5): 1},
        max_stopped_wait_s=2.5,
        micro_batches=taken,
        fillers=0,
        tokens=1000 * taken,
        delivered_tokens=1000 * taken,
        wire_bytes=2200 * taken,
        verified=taken,
        num_microbatches=2,
        last_taken_s=109.9,
        welcomed_s=92.0,
        first_taken_s=93.0,
        all_taken_s=93.5,
        late={bin_of(0.0005): 100},
        ended=0,
        disconnects=0,
        errors={},
        waiting_for={"slow readers": 5000, "slow readers: rank 1 (dp1·cp0·tp0·pp0)": 4000, "loading": 1000},
    )
    return replace(told, **changes)  # type: ignore[arg-type]


def moments(memory: Iterable[float]) -> list[IntervalMetrics]:
    return [
        IntervalMetrics(
            at_s=float(second),
            tokens_per_s=20_000.0,
            micro_batches_per_s=20.0,
            gigabytes_per_s=0.001,
            wait_p99_ms=1.0,
            waiting=1,
            waited_for="",
            connected=4,
            server_cores=0.5,
            server_memory_bytes=round(size * MIB),
            client_memory_bytes=100 * MIB,
            server_open_files=20 + second,
        )
        for second, size in enumerate(memory)
    ]


def run_of(*results: WorkerResult, memory: Iterable[float] = (200.0,) * 11) -> Measurements:
    return Measurements(
        setting=SETTING,
        results=results,
        moments=moments(memory),
        connect_s=91.0,
        begin_s=100.0,
        until_s=110.0,
        stop=(5.0, 7.5),
        server_start_s=0.7,
        server=(Usage(3.0, 0, 0), Usage(3.02, 0, 0)),
        clients=(Usage(1.0, 0, 0), Usage(1.1, 0, 0)),
    )


TWO = (
    result(of_rank(0, 60, 0.01, 0.02), of_rank(2, 60)),
    result(of_rank(1, 40, 0.5), of_rank(3, 40), welcomed_s=92.5),
)


def outcome(*required: str, run: Measurements | None = None, stopped: bool = False) -> LoadTestOutcome:
    return outcome_of(run or run_of(*TWO), tuple(map(parse_threshold, required)), stopped=stopped)


def test_rates_and_costs_are_of_the_measured_time() -> None:
    metrics = outcome().metrics
    assert metrics["micro_batches_per_s"] == 20.0
    assert metrics["tokens_per_s"] == 20_000.0
    assert metrics["gigabytes_per_s"] == pytest.approx(44e-6)
    assert metrics["wire_bytes_per_token"] == 2.2
    assert metrics["step_ms"] == pytest.approx(1000 * 10 / (200 / 4 / 2))
    assert metrics["fairness"] == 1.0, "rank 1 is slow, and rank 3 stops"
    assert metrics["server_cpu_s_per_mtok"] == pytest.approx(0.1)
    assert metrics["client_cpu_s_per_mtok"] == pytest.approx(0.5)
    assert (metrics["handshakes_s"], metrics["first_micro_batch_s"], metrics["server_start_s"]) == (1.5, 2.0, 0.7)


def test_fairness_is_among_ranks_that_ask_for_as_much() -> None:
    equal = replace(run_of(*TWO), setting=replace(SETTING, slow_ranks=(), stopped_ranks=()))
    assert outcome(run=equal).metrics["fairness"] == pytest.approx(40 / 50)
    none_left = replace(run_of(*TWO), setting=replace(SETTING, slow_ranks=(0, 1, 2, 3)))
    assert outcome(run=none_left).metrics["fairness"] is None


def test_waits_are_of_all_ranks_and_of_each() -> None:
    found = outcome()
    assert found.metrics["wait_max_ms"] == 500.0
    assert found.metrics["wait_p50_ms"] == pytest.approx(20.0, rel=0.01)
    assert found.metrics["wait_share"] == pytest.approx(0.53 / 40)
    assert found.metrics["stopped_wait_max_ms"] == 2500.0
    assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    assert [rank.slow for rank in found.ranks] == [False, True, False, False]
    assert found.ranks[1].wait_max_ms == 500.0
    assert found.waits[-1][1] == 1.0


def test_memory_is_the_most_that_was_seen_and_its_slope_that_of_the_later_time() -> None:
    settled = outcome(run=run_of(*TWO, memory=[100, 150, 200, 250, *[300.0] * 8])).metrics
    assert settled["server_memory_mib"] == 300.0
    assert settled["server_memory_slope"] == pytest.approx(0.0, abs=1e-6)
    assert settled["server_memory_of_bound"] == 0.75
    growing = outcome(run=run_of(*TWO, memory=[100.0 + second for second in range(11)])).metrics
    assert growing["server_memory_slope"] == pytest.approx(60.0)


def test_what_cannot_be_known_is_none_and_misses_what_is_required() -> None:
    unseen = replace(run_of(*TWO), server=None, moments=[], setting=replace(SETTING, stopped_ranks=()))
    found = outcome("server_memory_mib < 1000", run=unseen)
    for name in ("server_cpu_s_per_mtok", "server_memory_mib", "server_memory_slope", "stopped_wait_max_ms"):
        assert found.metrics[name] is None
    assert not found.ok


def test_nothing_measured_is_no_division_by_zero() -> None:
    empty = outcome(run=run_of(result(welcomed_s=None, first_taken_s=None, max_stopped_wait_s=0.0), memory=()))
    assert empty.metrics["tokens_per_s"] == 0.0
    assert empty.metrics["fairness"] is None
    assert empty.metrics["handshakes_s"] is None


def test_a_stream_that_ends_is_measured_to_its_last_micro_batch() -> None:
    ended = [replace(each, ended=2, last_taken_s=104.0) for each in TWO]
    found = outcome(run=run_of(*ended))
    assert (found.seconds, found.ended_early) == (4.0, "the stream ended")
    assert outcome(stopped=True).ended_early == "stopped by a signal"


def test_every_metric_has_a_value_or_none() -> None:
    assert outcome().metrics.keys() == METRICS.keys()


def test_errors_and_missed_thresholds_are_not_ok() -> None:
    assert outcome("fairness > 0.5").ok
    assert not outcome("fairness > 1").ok
    failed = replace(TWO[0], errors={"ServerFailed": 2}, examples={"ServerFailed": "the disk is full"})
    broken = outcome(run=run_of(failed, TWO[1]))
    assert (broken.ok, broken.ended_early, broken.metrics["errors"]) == (False, "a rank failed", 2)


def test_who_was_waited_for_follows_its_reason() -> None:
    assert [(waited.reason, waited.whom, waited.seconds) for waited in outcome().waited_for] == [
        ("slow readers", "", 10.0),
        ("slow readers", "rank 1 (dp1·cp0·tp0·pp0)", 8.0),
        ("loading", "", 2.0),
    ]


def test_a_result_survives_its_line() -> None:
    assert REPORTS.validate_json(REPORTS.dump_json(TWO[0])) == TWO[0]


# Shown -----------------------------------------------------------------------------------------------------


def test_json_holds_what_the_documentation_says() -> None:
    plain = json.loads(as_json(outcome("fairness > 1")))
    assert plain["verdicts"] == [{"require": "fairness > 1", "measured": 1.0, "met": False}]
    documented = (ROOT / "docs/loadtest.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([^`]+)` \|", documented, re.MULTILINE)
    assert set(METRICS) <= set(names)
    assert {name for name in _paths(plain) if not name.startswith(("metrics.", "errors.", "examples."))} <= set(names)


def _paths(value: object, prefix: str = "") -> set[str]:
    """The keys of a JSON value as the documentation writes them."""
    if isinstance(value, dict):
        return set().union(*(_paths(inner, f"{prefix}.{key}".lstrip(".")) for key, inner in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _paths(value[0], f"{prefix}[]")
    return {f"{prefix}[]" if isinstance(value, list) else prefix}


def test_the_table_names_figures_those_waited_for_and_what_was_missed() -> None:
    text = io.StringIO()
    show(outcome("fairness > 1", "errors < 1"), Console(file=text, width=120))
    for said in (
        "tokens/s",
        "20 k",
        "rank 1 (dp1·cp0·tp0·pp0), slow",
        "missed",
        "met",
        "2,500 ms",
        "synthetic <data>",
    ):
        assert said in text.getvalue()


def test_a_load_test_that_was_late_says_that_its_figures_are_of_both_ends() -> None:
    late = [replace(each, late={bin_of(0.1): 100}) for each in TWO]
    text = io.StringIO()
    show(outcome(run=run_of(*late)), Console(file=text, width=200))
    assert "the load test itself was late by up to 100 ms" in text.getvalue()


class Elements(HTMLParser):
    """Tags, and whatever they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]


def test_the_page_is_one_file_that_runs_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(outcome("fairness > 1"), page)
    text = page.read_text(encoding="utf-8")
    elements = Elements(text)
    assert not elements.references
    assert not {"script", "link", "iframe", "img"} & set(elements.tags)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert elements.tags.count("svg") == 4
    assert elements.tags.count("circle") == 4, "a dot for each rank"
    assert "synthetic &lt;data&gt;" in text
    assert "packhorse loadtest --ranks 4" in text
    assert "prefers-color-scheme: dark" in text


def test_a_page_of_next_to_nothing_is_a_page(tmp_path: Path) -> None:
    write_page(outcome(run=run_of(result(welcomed_s=None), memory=())), tmp_path / "report.html")
    assert "not known" in (tmp_path / "report.html").read_text(encoding="utf-8")
