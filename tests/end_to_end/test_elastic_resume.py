"""A checkpoint goes on at another length, layout or with other data, across real server processes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse import MicroBatch, ParallelLayout, ServerFailed
from tests.harness import reading, running_server, write_config
from tests.service.corpus import Pair, stored_pairs, write_shard

LENGTH = 64
STEP = 8  # micro-batches of a step, over all ranks


def write_shards(folder: Path, first: int = 1) -> None:
    """Two shards of samples of up to six rows; no id comes twice. Other ids make shards of the same size."""
    lengths = np.clip(np.random.default_rng(3).lognormal(4.3, 1.0, (2, 60)).astype(int), 2, 390)
    for number, of_shard in enumerate(lengths.tolist()):
        samples = {}
        for key, length in enumerate(of_shard):
            samples[f"{key:03d}"] = range(first, first + length)
            first += length
        write_shard(folder / f"a-{number}.tar", samples)


@pytest.fixture
def long_shards(tmp_path: Path) -> Path:
    write_shards(tmp_path)
    return tmp_path


def config_of(folder: Path, length: int = LENGTH, data: int = 1, **settings: Any) -> Path:
    contract = {"seq_length": length, "global_batch_size": STEP, "vocab_size": 60_000}
    sources = {"a": {"shards": "a-*.tar", "over_length": "split"}}
    return write_config(folder, **{"contract": contract, "sources": sources, "layout": {"data": data}, **settings})


def run_job(
    config: Path, data: int, state: dict[str, object] | None, steps: int | None
) -> tuple[list[MicroBatch], dict[str, object]]:
    """All ranks of a job from one state on, for so many steps or to the end; one rank's state behind them."""
    layout = ParallelLayout(data=data)

    def rank(endpoint: str, number: int) -> tuple[list[MicroBatch], dict[str, object]]:
        with reading(endpoint, layout=layout, rank=number) as feed:
            if state is not None:
                feed.load_state_dict(state)
            taken = list(itertools.islice(feed, None if steps is None else steps * STEP // data))
            return taken, feed.state_dict()

    with running_server(config) as server, ThreadPoolExecutor(data) as pool:
        ranks = list(pool.map(rank, [server.endpoint] * data, range(data)))
    assert all(saved == ranks[0][1] for _, saved in ranks), "one state serves all ranks"
    return [mb for taken, _ in ranks for mb in taken], ranks[0][1]


def pairs(micro_batches: Sequence[MicroBatch]) -> Counter[Pair]:
    found = Counter[Pair]()
    for mb in micro_batches:
        if not mb.filler:
            found.update((i, t) for i, t in zip(mb.tokens.tolist(), mb.labels.tolist(), strict=True) if t != -100)
    return found


def test_jobs_of_any_size_and_length_one_after_the_other_deliver_every_target_once(long_shards: Path) -> None:
    """1, 2, 4 and 8 ranks; half and twice the length; pieces of cut samples wait in every checkpoint."""
    found, state = Counter[Pair](), None
    log = long_shards / "server.log"
    for data, length, steps in ((1, 64, 3), (2, 32, 2), (8, 32, 2), (4, 128, 1), (1, 24, None)):
        before = None if state is None else state["position"]
        taken, state = run_job(config_of(long_shards, length, data), data, state, steps)
        found += pairs(taken)
        warned = f"resuming: from step {before[0]} on packs differ" in log.read_text() if before else False
        assert warned == (before is not None and data != 8)
    assert found == stored_pairs(sorted(long_shards.glob("a-*.tar")))


def test_a_change_of_data_is_refused_with_the_line_that_allows_it_and_goes_on_with_it(long_shards: Path) -> None:
    _, state = run_job(config_of(long_shards), 1, None, 3)
    date = "2026-01-02"
    with running_server(config_of(long_shards, date=date)) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(state)
        with pytest.raises(
            ServerFailed, match=r"these differ: date;.*resume: \{allow_changes: \[date@\w{16}\]\}"
        ) as error:
            next(feed)
    line = str(error.value).partition("allow_changes: [")[2].partition("]")[0]
    config = config_of(long_shards, date=date, resume={"allow_changes": [line]})
    taken, later = run_job(config, 1, state, 2)
    assert taken[0].position == (3, 0)
    log = (long_shards / "server.log").read_text()
    assert "resuming: from step 3 on date differs from the checkpoint's, as allowed" in log
    run_job(config, 1, later, 1)
    assert "date differs" not in (long_shards / "server.log").read_text()


def test_a_restarted_server_whose_shard_was_written_anew_serves_nobody_another_stream(long_shards: Path) -> None:
    """Same name, same size, other ids: the digests of the shards tell."""
    _, state = run_job(config_of(long_shards), 1, None, 3)
    sizes = [path.stat().st_size for path in sorted(long_shards.glob("a-*.tar"))]
    write_shards(long_shards, first=2)
    assert [path.stat().st_size for path in sorted(long_shards.glob("a-*.tar"))] == sizes
    with running_server(config_of(long_shards)) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(state)
        with pytest.raises(ServerFailed, match="these differ: manifest"):
            next(feed)
