"""Whether the ranks of a process group hold views of one and the same micro-batch."""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist

from packhorse.contract.position import Position
from packhorse.errors import ContractError

__all__ = ["verify_same"]

FORMAT = struct.Struct("<qq16s")  # step, index, row digest


def verify_same(position: Position, row_digest: bytes, group: Any = None) -> None:
    """Compare position and row digest over ``group``, a ``torch.distributed`` group of peers; collective.

    Tensor-, context- and pipeline-parallel peers of one data-parallel coordinate hold views of one row. The
    digest is the server's, of the whole row, so it is equal for all of them.

    Raises ``ContractError`` on every rank of the group, naming who holds what, where they differ.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.frombuffer(bytearray(FORMAT.pack(*position, row_digest)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    held = [bytes(tensor.cpu().tolist()) for tensor in gathered]
    if len(set(held)) > 1:
        lines = "\n".join(f"  {_described(rank, parts)}" for rank, parts in enumerate(held))
        raise ContractError(
            "the ranks of this group hold different micro-batches; each must read its own coordinate, and peers of one "
            f"data-parallel coordinate the same position:\n{lines}"
        )


def _described(rank: int, parts: bytes) -> str:
    step, index, digest = FORMAT.unpack(parts)
    return f"rank {rank} of the group: step {step}, index {index}, row {digest.hex()}"
