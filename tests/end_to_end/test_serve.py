"""``packhorse serve`` as a process of its own, read through real sockets."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from packhorse import BatchContract, Feed, HandshakeRefused, MicroBatch, ParallelLayout, ServerFailed
from tests.harness import DEADLINE_S, read_all, read_rank, running_server, wait_until, write_config
from tests.service.shards_on_disk import ids_member, write_tar

CONTRACT = {"seq_length": 256, "global_batch_size": 8, "vocab_size": 1000}


def targets_on_disk(folder: Path) -> Counter[tuple[int, int]]:
    """(input, target) pairs of every ``.npy`` sample, counted without any of our reading code."""
    pairs: Counter[tuple[int, int]] = Counter()
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                extension = member.name.split(".", 1)[1]
                stream = tar.extractfile(member)
                if extension == "npy" and stream is not None:
                    pairs.update(itertools.pairwise(np.load(io.BytesIO(stream.read())).tolist()))
    return pairs


def targets_delivered(micro_batches: Iterable[MicroBatch]) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for mb in micro_batches:
        real = mb.labels != mb.ignore_index
        pairs.update(zip(mb.tokens[real].tolist(), mb.labels[real].tolist(), strict=True))
    return pairs


@pytest.mark.parametrize(
    ("layout", "partition"),
    [
        (ParallelLayout(), "whole"),
        (ParallelLayout(data=2, context=2), "zigzag"),
        (ParallelLayout(data=2, context=2), "whole"),
        (ParallelLayout(data=4, context=1), "contiguous"),
        (ParallelLayout(data=1, context=2, tensor=2), "contiguous"),
    ],
    ids=str,
)
def test_every_target_arrives_once_and_all_ranks_end_together(
    token_shards: Path, layout: ParallelLayout, partition: str
) -> None:
    sizes = {"data": layout.data, "context": layout.context, "tensor": layout.tensor}
    config = write_config(
        token_shards,
        layout=sizes,
        contract={**CONTRACT, "partition": partition},
        sources={"a": {"shards": "a-*.tar"}},
    )
    with running_server(config) as server:
        received = read_all(server.endpoint, layout)
        assert server.process.wait(DEADLINE_S) == 0
    positions = {rank: [mb.position for mb in mbs] for rank, mbs in received.items()}
    assert len({tuple(p) for p in positions.values()}) == 1
    readers = {rank: layout.coordinates(rank) for rank in received}
    once = [
        mb
        for rank, mbs in received.items()
        for mb in mbs
        if readers[rank].tensor == 0 and (partition != "whole" or readers[rank].context == 0)
    ]
    assert targets_delivered(once) == targets_on_disk(token_shards)
    assert any(mb.filler for mb in once)
    for mb in once:
        assert len(mb.tokens) == mb.width // (1 if mb.holds_whole_row else layout.context)
        if mb.holds_whole_row:
            assert mb.computed_digest() == mb.row_digest


def test_step_counts_are_the_sums_over_all_data_parallel_ranks(token_shards: Path) -> None:
    layout = ParallelLayout(data=2, context=2)
    config = write_config(
        token_shards,
        layout={"data": 2, "context": 2},
        contract={**CONTRACT, "partition": "zigzag"},
        sources={"a": {"shards": "a-*.tar"}},
    )
    with running_server(config) as server:
        received = read_all(server.endpoint, layout)
    by_step: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for rank, mbs in received.items():
        for mb in mbs:
            by_step[mb.step] += mb.local_loss_tokens
            tokens[mb.step] += mb.num_tokens if layout.coordinates(rank).context == 0 and not mb.filler else 0
    for mb in received[0]:
        assert mb.step_loss_tokens == by_step[mb.step]
        assert mb.step_tokens == tokens[mb.step]


def test_what_became_of_every_target_is_logged_at_the_end(token_shards: Path) -> None:
    config = write_config(
        token_shards,
        contract={**CONTRACT, "seq_length": 64},
        packing={"window": 2},
        sources={"a": {"shards": "a-*.tar", "over_length": "truncate_right"}},
    )
    with running_server(config) as server:
        micro_batches = read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
        assert server.process.wait(DEADLINE_S) == 0
    delivered, stored = targets_delivered(micro_batches).total(), targets_on_disk(token_shards).total()
    (line,) = [line for line in config.with_name("server.log").read_text().splitlines() if "source 'a'" in line]
    assert (
        f"of {stored} targets {delivered} packed, {stored - delivered} lost, 0 unsupervised, 0 left over, 0 pending;"
        in line
    )
    assert stored > delivered


def test_two_runs_deliver_identical_bytes_whatever_the_number_of_workers(token_shards: Path) -> None:
    runs = []
    for workers in (1, 3):
        config = write_config(
            token_shards,
            layout={"data": 2},
            contract=CONTRACT,
            loading={"workers": workers, "block_bytes": 4096},
            sources={"a": {"shards": "a-*.tar"}},
        )
        with running_server(config) as server:
            received = read_all(server.endpoint, ParallelLayout(data=2))
        runs.append({rank: [mb.computed_digest() for mb in mbs] for rank, mbs in received.items()})
    assert runs[0] == runs[1]


def test_a_reader_that_disagrees_is_refused_with_every_difference(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}})
    declared = BatchContract(seq_length=512, partition="zigzag", global_batch_size=8)  # type: ignore[arg-type]
    with running_server(config) as server:
        with pytest.raises(HandshakeRefused) as refused:
            read_rank(server.endpoint, ParallelLayout(), 0, declared)
        assert [v.rule for v in refused.value.violations] == ["SEQ_LENGTH_MATCH", "PARTITION"]
        assert "seq_length of rank 0 (dp0·cp0·tp0·pp0) is 512, must be 256 (the server's)" in str(refused.value)
        # The same server serves the corrected job.
        assert read_rank(server.endpoint, ParallelLayout(), 0, BatchContract(seq_length=256))


def test_a_reader_learns_who_is_missing(token_shards: Path) -> None:
    config = write_config(token_shards, layout={"data": 4}, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}})
    with running_server(config) as server, pytest.raises(HandshakeRefused) as refused:
        read_rank(server.endpoint, ParallelLayout(data=4), 1, BatchContract(), start_timeout=3.0)
    text = str(refused.value)
    for rank in (0, 2, 3):
        assert f"rank {rank} (" in text
    assert "rank 1 (" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_server_within_5_seconds_and_leaves_no_process(
    token_shards: Path, number: signal.Signals
) -> None:
    config = write_config(
        token_shards,
        contract=CONTRACT,
        loading={"workers": 2},
        sources={"a": {"shards": "a-*.tar", "epochs": "endless"}},
    )
    with running_server(config) as server:
        with Feed(server.endpoint, arrays="numpy") as feed:
            next(feed)
            children = children_of(server.process.pid)
            assert len(children) >= 2
            code = server.signal_and_wait(number)
            assert code == (-number if number is signal.SIGKILL else 0), "it was asked to stop, and did"
        wait_until(lambda: not any(map(alive, children)), "the end of the loader processes", 5)


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_reader_that_crashes_does_not_end_the_server_and_its_job_begins_again(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}})
    with running_server(config) as server:
        crashed = Feed(server.endpoint, arrays="numpy")
        first = next(crashed).computed_digest()
        crashed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert server.process.poll() is None
        again = read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
        assert again[0].computed_digest() == first
        assert server.process.wait(DEADLINE_S) == 0
    assert targets_delivered(again) == targets_on_disk(token_shards)


def test_steps_are_whole_and_keys_name_their_samples_on_request(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, keys=True, sources={"a": {"shards": "a-*.tar"}})
    with running_server(config) as server, Feed(server.endpoint, arrays="numpy") as feed:
        steps = list(feed.steps())
    assert [len(step) for step in steps] == [8] * len(steps)
    seen = Counter(key for step in steps for mb in step for key in mb.keys)
    assert set(seen.values()) == {1}
    assert len(seen) == 240
    source, shard, key = next(iter(seen))
    with tarfile.open(token_shards / shard) as tar:
        assert f"{key}.npy" in tar.getnames()
    assert source == "a"


def test_ids_above_16_bits_travel_whole(tmp_path: Path) -> None:
    ids = [1, 65_535, 65_536, 151_643, 2]
    write_tar(tmp_path / "a.tar", [("x.npy", ids_member(ids))])
    config = write_config(
        tmp_path,
        contract={"seq_length": 8, "global_batch_size": 1, "vocab_size": 151_669},
        sources={"a": {"shards": "a.tar"}},
    )
    with running_server(config) as server:
        (mb,) = read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
    assert mb.tokens[:4].tolist() == ids[:-1]
    assert mb.labels[:4].tolist() == ids[1:]


def test_a_server_that_keeps_running_serves_one_job_after_the_other_at_one_endpoint(token_shards: Path) -> None:
    config = write_config(token_shards, contract=CONTRACT, sources={"a": {"shards": "a-*.tar"}})
    with running_server(config, "--keep-running") as server:
        first, second = (read_rank(server.endpoint, ParallelLayout(), 0, BatchContract()) for _ in range(2))
        with Feed(server.endpoint, arrays="numpy", start_timeout=DEADLINE_S) as left_early:
            third = next(left_early)
        assert server.signal_and_wait(signal.SIGTERM) == 0
    assert [mb.computed_digest() for mb in first] == [mb.computed_digest() for mb in second]
    assert third.computed_digest() == first[0].computed_digest()
    assert targets_delivered(first) == targets_on_disk(token_shards)


def broken_shard(folder: Path) -> Path:
    write_tar(folder / "a.tar", [("x.npy", ids_member([1, 1000, 2]))])
    return write_config(folder, contract={**CONTRACT, "vocab_size": 100}, sources={"a": {"shards": "a.tar"}})


def failure_logged(config: Path) -> bool:
    return "a job that begins here fails with this" in config.with_name("server.log").read_text()


def test_a_server_whose_data_failed_tells_whoever_comes_later_and_ends(tmp_path: Path) -> None:
    config = broken_shard(tmp_path)
    with running_server(config) as server:
        wait_until(lambda: failure_logged(config), "the failure")
        with pytest.raises(ServerFailed, match="1000"):
            read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())
        assert server.process.wait(DEADLINE_S) == 1


def test_a_server_whose_data_failed_and_that_is_stopped_has_failed(tmp_path: Path) -> None:
    config = broken_shard(tmp_path)
    with running_server(config) as server:
        wait_until(lambda: failure_logged(config), "the failure")
        assert server.process.poll() is None
        assert server.signal_and_wait(signal.SIGTERM) == 1
