"""Bad input, through ``packhorse serve``: each its own clear error, exit code 1, no traceback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhorse import BatchContract, ParallelLayout
from packhorse.errors import ServerFailed, StartTimeout
from tests.harness import DEADLINE_S, failing_server, read_rank, running_server, write_config
from tests.service.shards_on_disk import ids_member, write_tar

CONTRACT = {"seq_length": 64, "global_batch_size": 1, "vocab_size": 1000}
GOOD = ("good.npy", ids_member([1, 2, 3]))


def _truncated(folder: Path) -> None:
    path = write_tar(folder / "a.tar", [GOOD, ("cut.npy", ids_member(list(range(1, 400))))])
    path.write_bytes(path.read_bytes()[: 512 * 3 + 700])


def _shard(*files: tuple[str, bytes]) -> Callable[[Path], None]:
    return lambda folder: (write_tar(folder / "a.tar", files), None)[1]


# what is wrong, how to make it, what the message must name
SHARDS: list[tuple[str, Callable[[Path], Any], list[str]]] = [
    ("missing shard", lambda folder: None, ["sources.a.shards", "a.tar"]),
    ("truncated", _truncated, ["shard 'a.tar'", "cut.npy", "cut"]),
    ("garbage", lambda folder: (folder / "a.tar").write_bytes(b"no tar at all" * 100), ["shard 'a.tar'", "byte 0"]),
    ("empty shard", lambda folder: (folder / "a.tar").write_bytes(b""), ["a.tar", "empty"]),
    ("not UTF-8", _shard(("x.txt", b"\xff\xfe broken")), ["x.txt", "UTF-8", "skip_budget"]),
    ("malformed JSON", _shard(("x.json", b'{"messages": [')), ["x.json", "JSON", "skip_budget"]),
    ("over length", _shard(("long.npy", ids_member([5] * 66))), ["'long'", "65", "seq_length=64", "over_length"]),
    ("empty sample", _shard(("x.npy", ids_member([7]))), ["x.npy", "1 id"]),
    ("id beyond the vocabulary", _shard(("x.npy", ids_member([1, 1000]))), ["x.npy", "1000", "vocab"]),
    ("negative id", _shard(("x.npy", ids_member([1, -5, 2]))), ["x.npy", "-5"]),
    ("duplicate keys", _shard(GOOD, ("other.npy", GOOD[1]), GOOD), ["a.tar", "duplicate key", "'good'"]),
    ("unknown format", _shard(("x.jpg", b"?")), ["x.jpg", ".txt", ".json", ".npy"]),
]


@pytest.mark.parametrize(("make", "named"), [case[1:] for case in SHARDS], ids=[case[0] for case in SHARDS])
def test_a_shard_that_cannot_be_used_is_named(text_folder: Path, make: Callable[[Path], Any], named: list[str]) -> None:
    make(text_folder)
    config = write_config(
        text_folder, tokenizer="tokenizer.json", contract=CONTRACT, sources={"a": {"shards": "a.tar"}}
    )
    printed = failing_server(config)
    for words in named:
        assert words in printed, printed


CONFIGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("a monitor without a host", {"monitor": "9555"}, ["monitor='9555'", "HOST:PORT"]),
    ("weight 0", {"sources": {"a": {"shards": "a.tar", "weight": 0}}}, ["sources.a.weight", "0", "greater than 0"]),
    ("weight negative", {"sources": {"a": {"shards": "a.tar", "weight": -2}}}, ["sources.a.weight", "-2"]),
    ("unknown field", {"sources": {"a": {"shards": "a.tar", "wieght": 1}}}, ["sources.a.wieght", "'weight'"]),
    ("unknown section", {"pakcing": {}}, ["pakcing", "'packing'"]),
    (
        "contract broken",
        {"contract": {**CONTRACT, "global_batch_size": 3}, "layout": {"data": 2}},
        ["GBS_DIVIDES", "2 or 4"],
    ),
    (
        "all at once",
        {"contract": {**CONTRACT, "seq_length": 30, "global_batch_size": 3}, "layout": {"data": 2, "context": 2}},
        ["GBS_DIVIDES", "CP_LENGTH", "PACK_ALIGN"],
    ),
    ("no length", {"contract": {"global_batch_size": 1, "vocab_size": 10}}, ["contract.seq_length", "required"]),
    ("no such tokenizer", {"tokenizer": "absent.json"}, ["tokenizer.file", "absent.json"]),
]


@pytest.mark.parametrize(("settings", "named"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_a_setting_that_cannot_be_used_is_named(tmp_path: Path, settings: dict[str, Any], named: list[str]) -> None:
    write_tar(tmp_path / "a.tar", [GOOD])
    defaults: dict[str, Any] = {"contract": CONTRACT, "sources": {"a": {"shards": "a.tar"}}}
    printed = failing_server(write_config(tmp_path, **{**defaults, **settings}))
    for words in named:
        assert words in printed, printed


@pytest.mark.parametrize(("setting", "form"), [("listen", "tcp://127.0.0.1:{}"), ("monitor", "127.0.0.1:{}")])
def test_a_port_in_use_is_named(tmp_path: Path, setting: str, form: str) -> None:
    write_tar(tmp_path / "a.tar", [GOOD])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = form.format(taken.getsockname()[1])
        config = write_config(tmp_path, contract=CONTRACT, sources={"a": {"shards": "a.tar"}}, **{setting: address})
        printed = failing_server(config)
    assert f"{setting}={address!r}" in printed
    assert "in use" in printed


def test_a_key_for_a_server_without_keys_is_no_silent_wish(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [GOOD])
    config = write_config(tmp_path, contract=CONTRACT, sources={"a": {"shards": "a.tar"}})
    assert "--key-file 'server.key': the configuration has no curve" in failing_server(
        config, "--key-file", "server.key"
    )


def test_an_endpoint_where_nobody_answers_ends_at_the_deadline_and_says_what_was_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # accepts and never speaks
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StartTimeout, match="is the server running") as timeout:
            read_rank(endpoint, ParallelLayout(), 0, BatchContract(), start_timeout=2.0)
    assert endpoint in str(timeout.value)
    assert threading.active_count() < 50


def test_readers_hear_of_bad_data_in_the_middle_of_the_stream(tmp_path: Path) -> None:
    """The stream's fault reaches every reader with its place, and ends the server."""
    files = [(f"{i:03d}.npy", ids_member([1 + i, 2, 3] * 8)) for i in range(120)]
    files[100] = ("100.npy", ids_member([1, 2000]))
    write_tar(tmp_path / "a.tar", files)
    config = write_config(
        tmp_path,
        contract=CONTRACT,
        loading={"workers": 1, "block_bytes": 10_000},
        sources={"a": {"shards": "a.tar", "shuffle": False}},
    )
    with running_server(config) as server:
        with pytest.raises(ServerFailed, match=r"100\.npy.*2000"):
            read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
        assert server.process.wait(DEADLINE_S) == 1


def test_a_skip_budget_skips_exactly_the_bad_samples(tmp_path: Path) -> None:
    files = [(f"{i:03d}.npy", ids_member([1 + i, 2, 3])) for i in range(20)]
    files[4], files[9] = ("004.npy", ids_member([1, -1])), ("009.npy", b"not an array")
    write_tar(tmp_path / "a.tar", files)
    sources = {"a": {"shards": "a.tar", "skip_budget": 2}}
    config = write_config(tmp_path, contract=CONTRACT, keys=True, sources=sources)
    with running_server(config) as server:
        received = read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
    keys = {key for mb in received for _, _, key in mb.keys}
    assert keys == {f"{i:03d}" for i in range(20)} - {"004", "009"}
