"""``packhorse.launch``: the stream of ``packhorse serve``, and neither a process nor a file left, whatever ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import packhorse
from packhorse.errors import ConfigError, ServerFailed
from packhorse.launching.launch import LaunchedFeed
from tests.harness import DEADLINE_S, read_all, running_server, wait_until, write_config
from tests.service.shards_on_disk import ids_member, write_tar

CONTRACT = {"seq_length": 32, "global_batch_size": 2, "vocab_size": 1000}
RANK = """
import json, os, sys, packhorse
layout = packhorse.ParallelLayout(data=int(os.environ.get("WORLD_SIZE", "1")))
feed = packhorse.launch("feed.yaml", layout=layout, arrays="numpy", start_timeout=300.0, stall_timeout=300.0)
pid = getattr(feed, "server_pid", None)
for micro_batch in feed:
    print(json.dumps([pid, list(micro_batch.position), micro_batch.tokens.tolist()]), flush=True)
    {then}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    samples = [(f"{number}.npy", ids_member(range(number, number + 20))) for number in range(40)]
    write_tar(tmp_path / "a.tar", samples)
    # Short enough for a socket, wherever the tests' own folders are.
    with tempfile.TemporaryDirectory(prefix="ph-", dir="/tmp") as run:
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        yield tmp_path


def config(folder: Path, data: int = 1) -> Path:
    return write_config(
        folder, layout={"data": data}, contract=CONTRACT, sources={"a": {"shards": "a.tar", "epochs": 1}}
    )


def sockets() -> list[Path]:
    return list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/*.sock"))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def launched(folder: Path, **options: Any) -> packhorse.Feed:
    timeouts: dict[str, Any] = {"start_timeout": DEADLINE_S, "stall_timeout": DEADLINE_S}
    return packhorse.launch(config(folder), arrays="numpy", **timeouts, **options)


def server_pid(feed: packhorse.Feed) -> int:
    assert isinstance(feed, LaunchedFeed)
    return feed.server_pid


@contextlib.contextmanager
def rank(folder: Path, then: str = "", **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.format(then=then)],
        cwd=folder,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_launched_feed_gives_what_a_server_gives_and_leaves_nothing(folder: Path) -> None:
    with launched(folder) as feed:
        pid = server_pid(feed)
        here = [micro_batch.tokens.tolist() for micro_batch in feed]
    assert is_gone(pid)
    assert not sockets()
    with running_server(config(folder)) as server:
        served = read_all(server.endpoint, packhorse.ParallelLayout())[0]
    assert here == [micro_batch.tokens.tolist() for micro_batch in served]
    assert len(here) > 8


def test_a_loop_that_is_left_early_leaves_no_server(folder: Path) -> None:
    with launched(folder) as feed:
        pid = server_pid(feed)
        next(feed)
    assert is_gone(pid)
    assert not sockets()


def test_ranks_of_torchrun_on_one_node_read_from_one_server(folder: Path) -> None:
    config(folder, data=2)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": folder.name, "MASTER_PORT": "29500"}
    with rank(folder, RANK="0", LOCAL_RANK="0", **job) as first, rank(folder, RANK="1", LOCAL_RANK="1", **job) as other:
        printed = [process.communicate(timeout=DEADLINE_S)[0].splitlines() for process in (first, other)]
    assert (first.returncode, other.returncode) == (0, 0)
    lines = [[json.loads(line) for line in of_rank] for of_rank in printed]
    assert len(lines[0]) == len(lines[1]) > 4
    with running_server(config(folder, data=2)) as server:
        served = read_all(server.endpoint, packhorse.ParallelLayout(data=2))
    for of_rank, expected in zip(lines, (served[0], served[1]), strict=True):
        assert [tokens for _, _, tokens in of_rank] == [micro_batch.tokens.tolist() for micro_batch in expected]
    assert is_gone(lines[0][0][0])
    assert not sockets()


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), 9)", "os._exit(3)", "sys.exit()", "raise ZeroDivisionError"])
def test_a_trainer_that_ends_leaves_no_server_whatever_ended_it(folder: Path, how: str) -> None:
    config(folder)
    with rank(folder, then=how) as process:
        assert process.stdout is not None
        pid = json.loads(process.stdout.readline())[0]
        process.wait(DEADLINE_S)
        wait_until(lambda: is_gone(pid) and not sockets(), "the end of the server")


def test_a_server_that_is_killed_fails_the_loop_at_once(folder: Path) -> None:
    with launched(folder) as feed:
        next(feed)
        os.kill(server_pid(feed), signal.SIGKILL)
        wait_until(lambda: is_gone(server_pid(feed)), "the end of the server")
        with pytest.raises(ServerFailed, match="signal SIGKILL"):
            list(feed)
    assert not sockets()


def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    write_config(folder, contract=CONTRACT, sources={"a": {"shards": "missing.tar"}})
    with pytest.raises(ConfigError, match=r"could not start, exit code 1:\n.*missing\.tar"):
        packhorse.launch(folder / "feed.yaml")
    assert not sockets()


def test_what_the_server_logs_is_logged_here(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), launched(folder) as feed:
        next(feed)
    said = [(record.name, record.levelname) for record in caplog.records if "listening on ipc://" in record.message]
    assert said == [("packhorse.server", "INFO")]
