"""One rank of the product: ``Feed`` with numpy arrays or torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from packhorse import BatchContract, Feed, ParallelLayout
from packhorse.feeding.array_converter import array_converter
from tests.benchmarks.consuming import Tally, consume, looked_at, tally_of

__all__: list[str] = []

DEADLINE_S = 600.0


def read(task: dict[str, Any]) -> Iterator[Tally]:
    layout = ParallelLayout(data=task["data"], tensor=task["tensor"])
    with Feed(
        task["endpoint"],
        contract=BatchContract(seq_length=task["capacity"]),
        layout=layout,
        rank=task["rank"],
        world_size=layout.world_size,
        arrays=task["arrays"],
        start_timeout=DEADLINE_S,
        stall_timeout=DEADLINE_S,
    ) as feed:
        for number, mb in enumerate(feed):
            tally = tally_of(mb.tokens, mb.cu_seqlens)
            if mb.filler:
                tally = Tally()
            else:
                looked_at(
                    number,
                    mb.tokens,
                    mb.labels,
                    mb.position_ids,
                    mb.loss_mask,
                    mb.cu_seqlens,
                    mb.cu_seqlens_padded,
                )
            yield tally


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        array_converter("torch")  # imports it before this rank is ready
        import torch

        torch.set_num_threads(1)
    consume(read)
