"""A finite training stream through a real server: all ranks end at the same step, whatever is left over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from packhorse import ParallelLayout
from tests.harness import DEADLINE_S, read_all, running_server, write_config
from tests.service.corpus import pairs_of, random_lengths, stored_pairs, write_source

LAYOUT = ParallelLayout(data=2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_source(tmp_path_factory.mktemp("finite") / "docs", random_lengths(1, 3, 31, longest=60))


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"packing": {"window": 3}}], ids=["alone", "windows"])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_all_ranks_end_at_the_same_step_with_every_target_or_all_whole_steps(
    shards: list[Path], remainder: str, settings: dict[str, Any], epochs: int
) -> None:
    contract = {"seq_length": 64, "global_batch_size": 10, "vocab_size": 10_000, "remainder": remainder}
    sources = {"docs": {"shards": str(shards[0].parent / "*.tar"), "epochs": epochs}}
    config = write_config(shards[0].parent, layout={"data": 2}, contract=contract, sources=sources, **settings)
    with running_server(config) as server:
        read = read_all(server.endpoint, LAYOUT)
        assert server.process.wait(DEADLINE_S) == 0
    positions = [[mb.position for mb in of_rank] for of_rank in read.values()]
    steps = len(positions[0]) // 5
    assert positions == [[(step, index) for step in range(steps) for index in range(5)]] * 2
    every = [mb for of_rank in read.values() for mb in of_rank]
    stored = Counter({pair: n * epochs for pair, n in stored_pairs(shards).items()})
    found = Counter(pair for mb in every for pair in pairs_of(mb))
    fillers = {mb.step for mb in every if mb.filler}
    if remainder == "pad":
        assert found == stored
        assert fillers == {steps - 1}, "the data is such that something is left over"
    else:
        assert found < stored
        assert not fillers
        left_over = sum(stored.values()) - sum(found.values())
        assert left_over <= 9 * 64, "less than a step"
