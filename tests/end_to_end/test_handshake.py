"""One rank of eight is wrong, or never comes: the job is refused, by name, and nobody hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import DEADLINE_S, RunningServer, running_server, write_config

SCRIPT = """
import sys
from packhorse import BatchContract, Feed, PackhorseError, ParallelLayout
endpoint, context, seq_length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
layout = ParallelLayout(data=8 // context, context=context)
contract = BatchContract(seq_length=seq_length)
try:
    with Feed(endpoint, layout=layout, contract=contract, arrays="numpy", start_timeout=8.0) as feed:
        print("micro-batches", sum(1 for _ in feed))
except PackhorseError as error:
    sys.exit(str(error))
"""


class Rank(NamedTuple):
    """How one process of the job is started."""

    number: int
    context: int = 2
    seq_length: int = 256


def run_job(server: RunningServer, ranks: list[Rank]) -> list[tuple[int, str]]:
    """(exit code, what was printed) of every process; none may outlive its deadline by much."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, server.endpoint, str(rank.context), str(rank.seq_length)],
            env={**os.environ, "RANK": str(rank.number), "WORLD_SIZE": "8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ranks
    ]
    try:
        printed = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


SOUND = [Rank(number) for number in range(8)]
WRONG = {
    "another CP": ([*SOUND[:5], Rank(5, context=4), *SOUND[6:]], ("WORLD", "layout.context of rank 5")),
    "another sequence length": ([*SOUND[:3], Rank(3, seq_length=128), *SOUND[4:]], ("SEQ_LENGTH_MATCH", "of rank 3 (")),
    "a duplicate coordinate": ([*SOUND[:6], Rank(2), SOUND[7]], ("without rank 6 (", "rank 2 (")),
    "one never comes": (SOUND[:4] + SOUND[5:], ("RANKS_AGREE", "without rank 4 (")),
}


@pytest.mark.parametrize(("ranks", "named"), WRONG.values(), ids=WRONG)
def test_a_job_with_one_wrong_rank_is_refused_everywhere_and_the_corrected_one_is_served(
    token_shards: Path, ranks: list[Rank], named: tuple[str, str]
) -> None:
    config = write_config(
        token_shards,
        layout={"data": 4, "context": 2},
        contract={"seq_length": 256, "global_batch_size": 8, "vocab_size": 1000, "partition": "zigzag"},
        sources={"a": {"shards": "a-*.tar"}},
    )
    with running_server(config) as server:
        refused = run_job(server, ranks)
        assert all(code != 0 for code, _ in refused), refused
        # A process that lost its coordinate to another hears that alone, at once.
        told = [text for _, text in refused if "another process has claimed" not in text]
        assert len(told) >= 7
        for text in told:
            for words in named:
                assert words in text, text
        served = run_job(server, SOUND)
        assert [code for code, _ in served] == [0] * 8, served
        assert len({text for _, text in served}) == 1
        assert server.process.wait(DEADLINE_S) == 0
