"""Small load tests, of real processes: a server of its own, one that runs already, and all that can go wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packhorse import BatchContract, ParallelLayout
from tests.end_to_end.conftest import token_shards
from tests.harness import DEADLINE_S, read_all, running_server, wait_until, write_config
from tests.keys_on_disk import CURVE, make_keys

__all__ = ["token_shards"]  # a fixture

SMALL = ("--seq-length", "256", "--mean-length", "60", "--micro-batches", "2", "--consume-ms", "10")
CONTRACT = {"seq_length": 256, "global_batch_size": 4, "vocab_size": 1000}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "packhorse_service", "loadtest", *arguments]


def load_test(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def failing(*arguments: str) -> str:
    """What a load test says that must fail, on one line."""
    done = load_test(*arguments)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_ranks_of_a_layout_with_slow_and_stopped_ones_read_from_a_server_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = load_test(
        *SMALL,
        *("--layout", "data=4,tensor=2", "--slow-ranks", "1", "--slow-factor", "3", "--stopped-ranks", "1"),
        *("--seconds", "8", "--processes", "2", "--require", "errors<1", "--require", "disconnects <= 0"),
        *("--json", "-", "--html", str(page)),
    )
    assert done.returncode == 0, done.stderr
    result = result_of(done)
    assert result["ok"]
    metrics, totals, setting = result["metrics"], result["totals"], result["setting"]
    assert len(result["ranks"]) == setting["readers"] == 8
    assert sum(rank["micro_batches"] for rank in result["ranks"]) == totals["micro_batches"] > 40
    assert totals["verified"] == totals["micro_batches"], "every rank holds whole rows"
    # Tensor-parallel peers get the same rows: each token counts once, up to those under way when it was measured.
    assert totals["tokens"] == pytest.approx(totals["delivered_tokens"] / 2, rel=0.15)
    assert metrics["wire_bytes_per_token"] > 2
    assert metrics["stopped_wait_max_ms"] > 500, "the others wait for the one that stops"
    assert metrics["server_cpu_s_per_mtok"] > 0
    assert metrics["server_memory_mib"] > 20
    assert 8 <= metrics["server_open_files"] <= 8 + 64
    whom = [waited["whom"] for waited in result["waited_for"] if waited["reason"] == "slow readers"]
    assert any(name.startswith(f"rank {setting['stopped_ranks'][0]} ") for name in whom)
    assert "svg" in page.read_text(encoding="utf-8")


def test_a_scenario_over_ipc_misses_what_it_requires(tmp_path: Path) -> None:
    scenario = tmp_path / "load.yaml"
    scenario.write_text(
        "ranks: 3\ntransport: ipc\nconsume_ms: 10\nseconds: 30\nverify: false\n"
        "synthetic: {seq_length: 256, mean_length: 60, micro_batches: 2}\n"
        "require: [fairness > 2, errors < 1]\n"
    )
    done = load_test("--scenario", str(scenario), "--seconds", "1", "--json", "-")
    assert done.returncode == 1
    result = result_of(done)
    assert [verdict["met"] for verdict in result["verdicts"]] == [False, True]
    assert result["setting"]["endpoint"].startswith("ipc://")
    assert result["setting"]["seconds"] == 1, "the command line wins"
    assert (result["totals"]["verified"], result["errors"]) == (0, {})


def test_a_stream_that_ends_is_read_to_its_end(token_shards: Path) -> None:
    sources = {"a": {"shards": "a-*.tar", "epochs": 100}}
    config = write_config(token_shards, contract=CONTRACT, layout={"data": 2}, sources=sources)
    done = load_test(str(config), "--consume-ms", "1", "--seconds", "60", "--json", "-")
    assert done.returncode == 0, done.stderr
    result = result_of(done)
    assert result["ended_early"] == "the stream ended"
    assert 0 < result["seconds"] < 30
    assert "the stream ended" in done.stderr


def test_a_stream_that_ends_at_once_is_nothing_to_measure(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}})
    assert "ended before there was anything to measure" in failing(str(config), "--consume-ms", "0")


def test_a_server_that_runs_already_goes_on_when_its_ranks_have_gone(token_shards: Path) -> None:
    sources = {"a": {"shards": "a-*.tar", "epochs": 40}}
    config = write_config(token_shards, contract=CONTRACT, layout={"data": 2}, sources=sources)
    with running_server(config) as server:
        done = load_test(
            "--endpoint", server.endpoint, "--ranks", "2", "--consume-ms", "5", "--seconds", "1", "--json", "-"
        )
        assert done.returncode == 0, done.stderr
        result = result_of(done)
        assert result["totals"]["micro_batches"] > 10
        assert result["metrics"]["server_cpu_s_per_mtok"] is None
        assert "it is not ours" in done.stderr
        assert server.process.poll() is None
        delivered = read_all(server.endpoint, ParallelLayout(data=2), BatchContract())
        assert len(delivered[0]) == len(delivered[1]) > 10


def test_a_refused_contract_is_an_error_of_every_rank(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, layout={"data": 2}, sources={"a": {"shards": "a-*.tar"}})
    with running_server(config) as server:
        said = failing("--endpoint", server.endpoint, "--ranks", "3", "--seconds", "1")
    assert "HandshakeRefused" in said
    assert "data=3" in said or "DP3" in said or "layout" in said


def test_without_a_server_it_says_what_it_waited_for(tmp_path: Path) -> None:
    scenario = tmp_path / "load.yaml"
    scenario.write_text(f"endpoint: ipc://{tmp_path}/nobody\nranks: 2\nstart_timeout_s: 1\n")
    said = failing("--scenario", str(scenario))
    assert "of 2 ranks 0 are connected" in said
    assert "is a server running at the endpoint" in said


def test_a_feed_that_cannot_be_served_is_the_servers_error(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, sources={"a": {"shards": "missing-*.tar"}})
    assert "missing-*.tar" in failing(str(config), "--seconds", "1")


def test_ranks_with_keys_read_what_is_encrypted() -> None:
    done = load_test(*SMALL, "--ranks", "2", "--seconds", "1", "--curve", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert result_of(done)["totals"]["micro_batches"] > 20


def test_a_feed_that_has_keys_is_read_with_one_and_refused_without(token_shards: Path) -> None:
    make_keys(token_shards / "keys")
    settings = {"contract": CONTRACT, "layout": {"data": 2}, "sources": {"a": {"shards": "a-*.tar", "epochs": 100}}}
    config = str(write_config(token_shards, curve=CURVE, **settings))
    assert "has curve: give the ranks a key (key_file, or PACKHORSE_KEY_FILE)" in failing(config, "--seconds", "1")
    key = str(token_shards / "keys" / "trainers.key")
    assert load_test(config, "--seconds", "1", "--consume-ms", "5", "--key-file", key).returncode == 0


def test_keys_of_synthetic_data_are_made_and_those_of_others_are_given(tmp_path: Path) -> None:
    assert "synthetic data have no keys but those of curve" in failing("--key-file", str(tmp_path / "a.key"))
    assert "those of endpoint come with key_file" in failing("--curve", "--endpoint", "tcp://127.0.0.1:1")


def test_more_stopped_ranks_than_there_are_is_refused() -> None:
    assert "stopped_ranks=4: 4 ranks connect and 2 of them are slow" in failing(
        "--ranks", "4", "--slow-ranks", "50%", "--stopped-ranks", "4"
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_signal_ends_it_early_with_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    environment = f"PACKHORSE_LOADTEST={tmp_path}"
    process = subprocess.Popen(
        ["env", environment, *command(*SMALL, "--ranks", "2", "--seconds", "60", "--json", "-")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    wait_until(lambda: "measuring" in process.stderr.readline(), "the measurement")  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert json.loads(out)["ended_early"] == "stopped by a signal", err
    wait_until(lambda: not _marked(environment), "no process that is left")


def _marked(environment: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if environment.encode() + b"\0" in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue  # ended while we looked, or somebody else's
    return found
