"""One of four ranks, fed by a server: for each step its loss, gradients and samples, saved as FOLDER/STEP-RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from packhorse import BatchContract, Feed, ParallelLayout, Partition
from packhorse_service.demo.trainer import backward
from tests.service.demo.rows_by_hand import CONTEXT, DATA, NUM_MICROBATCHES, WIDTH, gradients, make_model


def main(endpoint: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (DATA, CONTEXT), mesh_dim_names=("data", "context"))
    contract = BatchContract(
        seq_length=WIDTH, global_batch_size=DATA * NUM_MICROBATCHES, partition=Partition.ZIGZAG, vocab_size=50
    )
    with Feed(endpoint, contract=contract, layout=ParallelLayout(data=DATA, context=CONTEXT)) as feed:
        for number, step in enumerate(feed.steps()):
            model = make_model(mesh["context"].get_group())
            loss = backward(model, step)
            keys = [key for micro_batch in step for _source, _shard, key in micro_batch.keys]
            fillers = sum(micro_batch.filler for micro_batch in step)
            torch.save((loss, gradients(model), keys, fillers), folder / f"{number}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
