"""A reader that brings a crafted snapshot: it is refused in words, and the next job is served as if it had not been."""

from __future__ import annotations

import base64
import itertools
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packhorse import ParallelLayout, ServerFailed
from packhorse.protocol.checkpoint_state import seal_state
from packhorse_service.mixing.order import SHARD_FORMAT, SOURCE_FORMAT
from packhorse_service.snapshot.codec import DIGEST_BYTES, HEAD, WINDOW, seal_snapshot
from tests.harness import reading, running_server, write_config
from tests.hostile.conftest import MEMORY_MIB, PeakMemory
from tests.service.corpus import mutated, random_lengths, write_source

State = dict[str, Any]
ALONE = ParallelLayout()
PIECES, ERAS = 20, HEAD.size + WINDOW.size
OPEN_SHARDS = 2
MUTATED = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Path]]:
    """A server for one reader: its endpoint, process and log. It waits for the next job behind each."""
    folder = tmp_path_factory.mktemp("crafted")
    write_source(folder / "docs", random_lengths(1, 2, 400, longest=120))
    config = write_config(
        folder,
        contract={"seq_length": 256, "global_batch_size": 2, "vocab_size": 100_000},
        sources={"docs": {"shards": "docs/*.tar", "epochs": "endless", "open_shards": OPEN_SHARDS}},
    )
    with running_server(config) as server:
        yield server.endpoint, server.process.pid, folder / "server.log"


def honest_state(endpoint: str) -> State:
    with reading(endpoint, layout=ALONE, rank=0) as feed:
        list(itertools.islice(feed, 6))
        return feed.state_dict()


def source_at(snapshot: bytes) -> int:
    """Where the place of the only source begins; behind it are its open shards and the bits."""
    pieces: int = struct.unpack_from("<I", snapshot, PIECES)[0]
    return len(snapshot) - DIGEST_BYTES - -(-pieces // 8) - OPEN_SHARDS * SHARD_FORMAT.size - SOURCE_FORMAT.size


def put(snapshot: bytes, at: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    return snapshot[:at] + packed + snapshot[at + len(packed) :]


def shard_at(snapshot: bytes) -> int:
    return source_at(snapshot) + SOURCE_FORMAT.size


# What an attacker would write where. A shard is named by its number in the manifest: there is no path to give.
CRAFTED: dict[str, Callable[[bytes], bytes]] = {
    "a shard that is none of ours": lambda s: put(s, shard_at(s), "<I", 1 << 31),
    "an offset behind the shard": lambda s: put(s, shard_at(s) + 4, "<Q", 1 << 40),
    "an offset where no member begins": lambda s: put(s, shard_at(s) + 4, "<Q", 512 * 3),
    "an offset between blocks": lambda s: put(s, shard_at(s) + 4, "<Q", 77),
    "four billion pieces": lambda s: put(s, PIECES, "<I", (1 << 32) - 1),
    "four billion draws": lambda s: put(s, ERAS, "<I", (1 << 32) - 1),
    "as many draws as are allowed": lambda s: put(s, ERAS, "<I", (1 << 18) - 1),
    "a sample that the block has not": lambda s: put(s, shard_at(s) + 20, "<I", (1 << 32) - 1),
    "epochs without end": lambda s: put(s, source_at(s), "<I", (1 << 32) - 1),
    "ids drawn without end": lambda s: put(s, source_at(s) + 12, "<Q", (1 << 64) - 1),
    "faults without end": lambda s: put(s, source_at(s) + 20, "<Q", (1 << 64) - 1),
    "nothing": lambda _: b"\0",
    "64 KiB of nothing": lambda _: bytes(64 << 10),
}


def refused(endpoint: str, state: State, snapshot: bytes) -> str:
    """What a reader that brings this snapshot is told."""
    # Whoever crafts a state can make its digests too.
    crafted = seal_state({**state, "snapshot": base64.b64encode(seal_snapshot(snapshot[:-DIGEST_BYTES])).decode()})
    with reading(endpoint, layout=ALONE, rank=0) as feed:
        feed.load_state_dict(crafted)
        try:
            next(iter(feed))
        except ServerFailed as error:
            return str(error)
    return "nothing"


def test_crafted_snapshots_are_refused_and_honest_jobs_are_served_between_them(served: tuple[str, int, Path]) -> None:
    endpoint, pid, log = served
    state = honest_state(endpoint)
    honest = base64.b64decode(state["snapshot"])
    with PeakMemory(pid) as memory:
        for what, craft in CRAFTED.items():
            said = refused(endpoint, state, craft(honest))
            assert "snapshot" in said, (what, said)
        assert honest_state(endpoint) == state
    assert memory.grown <= MEMORY_MIB, log.read_text()[-2000:]


def test_mutated_snapshots_never_end_the_server(served: tuple[str, int, Path]) -> None:
    endpoint, _, log = served
    state, source = honest_state(endpoint), random.Random(3)
    honest = base64.b64decode(state["snapshot"])
    for _ in range(MUTATED):
        said = refused(endpoint, state, mutated(honest, source))
        assert said == "nothing" or "snapshot" in said, log.read_text()[-2000:]
    assert honest_state(endpoint) == state
