"""``packhorse tap`` as a process: what it prints is what was delivered, and its state resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from packhorse import BatchContract, ConfigError, MicroBatch, ParallelLayout, ProtocolError
from packhorse_service.config.layout_text import layout_of
from packhorse_service.row_digests import local_digest
from packhorse_service.tap import TapSettings, load_state, tap
from tests.end_to_end.test_serve import targets_on_disk
from tests.harness import DEADLINE_S, read_rank, running_server, write_config

CONTRACT = {"seq_length": 256, "global_batch_size": 4, "vocab_size": 1000}


def config_of(folder: Path, **settings: Any) -> Path:
    return write_config(folder, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}}, **settings)


def run_tap(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packhorse_service", "tap", endpoint, "--timeout", "30", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_prints_every_row_with_digests_and_counts_of_what_was_delivered(token_shards: Path) -> None:
    with running_server(config_of(token_shards, keys=True)) as server:
        printed = rows(run_tap(server.endpoint, "--rank", "0", "--pairs", "--keys"))
        assert server.process.wait(DEADLINE_S) == 0
    with running_server(config_of(token_shards, keys=True)) as server:
        delivered = read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
    assert len({row["attempt"] for row in printed}) == 1
    for row, mb in zip(printed, delivered, strict=True):
        assert (row["step"], row["index"], row["num_microbatches"]) == (*mb.position, 4)
        assert (row["filler"], row["tokens"], row["loss_tokens"]) == (mb.filler, mb.num_tokens, mb.num_loss_tokens)
        assert row["local_loss_tokens"] == mb.loss_mask.sum()
        assert (row["step_tokens"], row["step_loss_tokens"]) == (mb.step_tokens, mb.step_loss_tokens)
        assert row["row_digest"] == mb.computed_digest().hex()
        assert row["local_digest"] == local_digest(mb).hex()
        assert row["keys"] == [list(key) for key in mb.keys]
    assert Counter(tuple(pair) for row in printed for pair in row["pairs"]) == targets_on_disk(token_shards)


def test_two_slices_of_a_row_have_one_row_digest_and_their_own_local_ones(token_shards: Path) -> None:
    config = write_config(
        token_shards,
        layout={"context": 2},
        contract={**CONTRACT, "partition": "zigzag"},
        sources={"a": {"shards": "a-*.tar"}},
    )
    with running_server(config) as server, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run_tap, server.endpoint, "--rank", r, "--layout", "context=2") for r in ("0", "1")]
        first, second = (rows(done.result()) for done in both)
    assert [row["row_digest"] for row in first] == [row["row_digest"] for row in second]
    assert all(a["local_digest"] != b["local_digest"] for a, b in zip(first, second, strict=True))


def test_it_goes_on_from_the_state_that_it_kept(token_shards: Path, tmp_path: Path) -> None:
    """Also a state that was kept in one run and used in the next on another server."""
    state = str(tmp_path / "state.json")
    config = config_of(token_shards)
    with running_server(config) as server:
        whole = rows(run_tap(server.endpoint))
    with running_server(config) as server:
        begun = rows(run_tap(server.endpoint, "--steps", "3", "--state-out", state))
        assert server.process.wait(DEADLINE_S) == 0  # it left in order
    assert len(begun) == 3 * 4
    with running_server(config) as server:
        rest = rows(run_tap(server.endpoint, "--resume", state, "--state-out", state))
    digests = [row["local_digest"] for row in whole]
    assert [row["local_digest"] for row in begun + rest] == digests
    with running_server(config) as server:
        assert rows(run_tap(server.endpoint, "--resume", state)) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", "1"], "rank=1 is outside the layout"),
        (["--layout", "data=two"], "'data=two' must be one of data, context, tensor, pipeline with its size"),
        (["--layout", "data=2,data=2"], "each once"),
        (["--layout", "data=2"], "rank is not known"),
        (["--resume", "no-such-file"], "--resume='no-such-file' cannot be read"),
        (["--trainer", "no-such-file"], "trainer file 'no-such-file' cannot be read"),
        (["--timeout", "0.5"], "no connection"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_said_in_one_error(arguments: list[str], said: str) -> None:
    done = run_tap("tcp://127.0.0.1:9", *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# Without a process ----------------------------------------------------------------------------------


def a_row(**changes: Any) -> MicroBatch:
    offsets = np.array([0, 4], np.int32)
    whole: dict[str, Any] = {
        "tokens": np.arange(4),
        "labels": np.arange(1, 5),
        "loss_mask": np.ones(4, np.float32),
        "position_ids": np.arange(4),
        "cu_seqlens": offsets,
        "cu_seqlens_padded": offsets,
        **dict.fromkeys(("max_seqlen", "num_tokens", "num_loss_tokens", "local_loss_tokens"), 4),
        **{"step_tokens": 4, "step_loss_tokens": 4, "step": 0, "index": 0, "num_microbatches": 1},
        **{"filler": False, "ignore_index": -100, "row_digest": bytes(16), "host_offsets": (offsets, offsets)},
    }
    made = MicroBatch(**{**whole, **changes})
    return made if "row_digest" in changes else replace(made, row_digest=made.computed_digest())


class FeedOf:
    """What ``tap`` needs of a feed, over rows that are here."""

    attempt = "00"

    def __init__(self, *rows: MicroBatch) -> None:
        self._rows = iter(rows)

    def __next__(self) -> MicroBatch:
        return next(self._rows)


def test_a_row_that_was_damaged_on_its_way_ends_it_unless_nothing_is_verified() -> None:
    damaged = a_row(row_digest=bytes(16))
    written: list[str] = []
    with pytest.raises(ProtocolError, match=r"row digest of \(0, 0\) is 0000"):
        tap(FeedOf(damaged), TapSettings(), written.append)  # type: ignore[arg-type]
    assert not written
    tap(FeedOf(damaged, a_row()), TapSettings(verify=False), written.append)  # type: ignore[arg-type]
    assert len(written) == 2


@pytest.mark.parametrize("field", ["tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded"])
def test_the_local_digest_tells_every_array_apart(field: str) -> None:
    array = getattr(a_row(), field).copy()
    array[-1] += 1
    variants: list[dict[str, Any]] = [{}, {field: array}, {field: None}]
    assert len({local_digest(a_row(row_digest=bytes(16), **changes)) for changes in variants}) == 3


def test_the_local_digest_is_of_a_position() -> None:
    row = a_row()
    moved = [replace(row, step=1), replace(row, index=1)]
    assert len({local_digest(mb) for mb in (row, *moved)}) == 3


def test_a_layout_and_a_state_are_read_strictly(tmp_path: Path) -> None:
    assert layout_of("") == ParallelLayout()
    assert layout_of("data=2,pipeline=3") == ParallelLayout(data=2, pipeline=3)
    for text in ("data", "data=", "data=-1", "expert=2", "data=1,data=1"):
        with pytest.raises(ConfigError, match="must be one of"):
            layout_of(text)
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "text").write_text("not json")
    for name, said in {"list": "holds list", "text": "cannot be read"}.items():
        with pytest.raises(ConfigError, match=said):
            load_state(tmp_path / name)
