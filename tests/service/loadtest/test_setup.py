"""What is decided before a process starts, and what is shown while they run."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packhorse import ConfigError, ParallelLayout
from packhorse_service.config.serve_config import load_config
from packhorse_service.loadtest.ranks.worker_messages import COMMANDS, REPORTS, Connect
from packhorse_service.loadtest.report.live_display import LiveDisplay, ProgressDisplay
from packhorse_service.loadtest.run.measurements import IntervalMetrics
from packhorse_service.loadtest.run.setup import LoadTestPlan, prepare
from packhorse_service.loadtest.run.workers import MODULE
from packhorse_service.loadtest.scenario.scenario import SyntheticConfig, load_scenario
from packhorse_service.loadtest.scenario.synthetic import write_synthetic_feed
from tests.harness import DEADLINE_S, write_config

TINY = {"seq_length": 64, "mean_length": 16}


def plan(folder: Path, **options: Any) -> LoadTestPlan:
    return prepare(load_scenario(None, {"synthetic": TINY, **options}), folder)


def test_every_rank_is_simulated_once_and_each_process_has_its_part_of_every_kind(tmp_path: Path) -> None:
    made = plan(tmp_path, layout="data=8,tensor=2", processes=3, slow_ranks="25%", stopped_ranks=2)
    jobs = made.jobs("tcp://127.0.0.1:1")
    assert sorted(rank for job in jobs for rank in job.ranks) == list(range(16))
    assert max(len(job.ranks) for job in jobs) - min(len(job.ranks) for job in jobs) <= 1
    assert (len(made.slow), len(made.stopped)) == (4, 2)
    assert not set(made.slow) & set(made.stopped)
    assert sorted(rank for job in jobs for rank in job.slow) == sorted(made.slow)


def test_tokens_are_counted_by_one_rank_of_each_data_parallel_coordinate(tmp_path: Path) -> None:
    layout = ParallelLayout(data=3, context=2, tensor=2)
    jobs = plan(tmp_path, layout="data=3,context=2,tensor=2").jobs("tcp://127.0.0.1:1")
    counted = [layout.coordinates(rank) for job in jobs for rank in job.counted]
    assert sorted(at.data for at in counted) == [0, 1, 2]
    assert all((at.context, at.tensor) == (0, 0) for at in counted)


def test_only_readers_are_simulated(tmp_path: Path) -> None:
    contract = {"seq_length": 64, "global_batch_size": 2, "vocab_size": 100, "readers": "tensor_zero"}
    sources = {"a": {"shards": "a-*.tar"}}
    config = write_config(tmp_path, layout={"data": 2, "tensor": 4}, contract=contract, sources=sources)
    assert prepare(load_scenario(None, {"feed": config}), tmp_path).ranks == (0, 4)


def test_there_are_no_more_slow_ranks_than_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="slow_ranks=9: only 8 ranks connect"):
        plan(tmp_path, slow_ranks=9)


def test_ranks_leave_in_order_where_the_server_is_of_the_test(tmp_path: Path) -> None:
    (own,) = plan(tmp_path, processes=1).jobs("tcp://127.0.0.1:1")
    scenario = load_scenario(None, {"endpoint": "tcp://127.0.0.1:1", "ranks": 1})
    (others,) = prepare(scenario, tmp_path).jobs("tcp://127.0.0.1:1")
    assert own.orderly
    assert not others.orderly, "it goes on for its next job"


def test_synthetic_data_are_the_same_for_a_seed_and_fit_their_feed(tmp_path: Path) -> None:
    synthetic = SyntheticConfig(seq_length=128, mean_length=40, vocab_size=77)
    written = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        config = load_config(write_synthetic_feed(tmp_path / name, synthetic, ParallelLayout(data=2), seed))
        written[name] = [path.read_bytes() for path in sorted((tmp_path / name).glob("*.tar"))]
        assert (config.layout, config.contract.vocab_size) == (ParallelLayout(data=2), 77)
    assert written["one"] == written["again"] != written["other"]
    with tarfile.open(tmp_path / "one" / "synthetic-000000.tar") as tar:
        members = [member.read() for member in (tar.extractfile(each) for each in tar) if member is not None]
    ids = [np.load(io.BytesIO(member), allow_pickle=False) for member in members]
    assert max(int(each.max()) for each in ids) < 77
    assert 20 < np.mean([len(each) for each in ids]) < 60, "the tail is cut"
    assert all(2 <= len(each) <= 129 for each in ids)


# Shown while it runs ---------------------------------------------------------------------------------------

MOMENT = IntervalMetrics(
    at_s=3.0,
    tokens_per_s=2e6,
    micro_batches_per_s=100.0,
    gigabytes_per_s=0.1,
    wait_p99_ms=4.0,
    waiting=2,
    waited_for="slow readers: rank 3 (dp3·cp0·tp0·pp0)",
    connected=8,
    server_cores=0.5,
    server_memory_bytes=300 << 20,
    client_memory_bytes=100 << 20,
    server_open_files=40,
)


def test_a_terminal_shows_figures_of_the_last_second_and_who_is_waited_for(tmp_path: Path) -> None:
    view, text = LiveDisplay(plan(tmp_path)), io.StringIO()
    view.show("measuring", MOMENT)
    Console(file=text, width=120).print(view.render())
    for said in ("measuring", "27 s left", "8 of 8", "2 M", "rank 3 (dp3·cp0·tp0·pp0)", "50% of a core, 300 MiB"):
        assert said in text.getvalue()


@given(st.lists(st.floats()), st.floats())
def test_a_terminal_shows_every_float(rates: list[float], other: float) -> None:
    view, text = (
        LiveDisplay(prepare(load_scenario(None, {"endpoint": "tcp://127.0.0.1:1", "ranks": 8}), Path())),
        io.StringIO(),
    )
    for rate in rates:
        view.show("measuring", replace(MOMENT, at_s=other, tokens_per_s=rate, wait_p99_ms=other, server_cores=other))
    Console(file=text, width=120).print(view.render())
    assert not rates or "tokens/s" in text.getvalue()


def test_elsewhere_there_is_a_line_every_few_seconds(tmp_path: Path) -> None:
    text = io.StringIO()
    with ProgressDisplay(plan(tmp_path), Console(file=text)).showing() as show:
        show("measuring", None)
        for second in range(12):
            show("measuring", replace(MOMENT, at_s=float(second)))
    assert [line.partition(" s:")[0].strip() for line in text.getvalue().splitlines()] == ["measuring", "0", "5", "10"]


# A worker alone --------------------------------------------------------------------------------------------


def test_a_worker_whose_coordinator_is_gone_ends_with_its_result(tmp_path: Path) -> None:
    (job,) = plan(tmp_path, ranks=3, processes=1).jobs(f"ipc://{tmp_path}/nobody")
    lines = b"".join(COMMANDS.dump_json(command) + b"\n" for command in (job, Connect()))
    worker = [sys.executable, "-m", MODULE]
    done = subprocess.run(worker, input=lines, capture_output=True, timeout=DEADLINE_S, check=True)
    told = [REPORTS.validate_json(line) for line in done.stdout.splitlines()]
    assert told[0].kind == "ready"
    assert told[-1].kind == "result"
    assert [rank.rank for rank in getattr(told[-1], "ranks", ())] == [0, 1, 2]
