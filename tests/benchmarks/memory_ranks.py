"""Many ranks in one process that read for some seconds, each a real ``Feed``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from packhorse import BatchContract, Feed, ParallelLayout
from tests.benchmarks.children import be_child

__all__: list[str] = []

DEADLINE_S = 600.0


def read(task: dict[str, Any]) -> dict[str, Any]:
    """One micro-batch of each rank after the other, with a pause after each round."""
    layout = ParallelLayout(data=task["ranks"])
    contract = BatchContract(seq_length=task["capacity"])
    options: dict[str, Any] = {"start_timeout": DEADLINE_S, "stall_timeout": DEADLINE_S, "arrays": "numpy"}
    tokens = 0
    with ExitStack() as leaving:
        feeds = [
            leaving.enter_context(
                Feed(task["endpoint"], contract=contract, layout=layout, rank=rank, world_size=layout.data, **options)
            )
            for rank in range(task["ranks"])
        ]
        end = time.monotonic() + task["seconds"]
        while time.monotonic() < end:
            tokens += sum(next(feed).num_tokens for feed in feeds)
            time.sleep(task["pause_s"])
    return {"tokens": tokens}


if __name__ == "__main__":
    be_child(read)
