"""One of four ranks: loss and gradients of the packed rows made by hand, saved as FOLDER/CASE-RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from packhorse_service.demo.trainer import backward
from tests.service.demo.rows_by_hand import CONTEXT, DATA, ROWS, gradients, make_model, make_rows, micro_batches


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (DATA, CONTEXT), mesh_dim_names=("data", "context"))
    data, context = divmod(dist.get_rank(), CONTEXT)
    for case, rows in ROWS.items():
        model = make_model(mesh["context"].get_group())
        loss = backward(model, micro_batches(make_rows(rows), data, context))
        torch.save((loss, gradients(model)), folder / f"{case}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
