"""Megatron-LM's broadcast over tensor ranks, run over gloo on what the adapter gives: every rank ends up with rank 0's.

The functions came to Megatron-Core after 0.16.1; where the installed one lacks them this is skipped. Its cut of packed
rows for context parallelism is a kernel of Transformer Engine, which needs a GPU.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from packhorse import MicroBatch
from packhorse.adapters import megatron_lm

pytest.importorskip("megatron.core", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of accelerator libraries that are not here
    from megatron.core import utils

pytestmark = pytest.mark.skipif(
    not hasattr(utils, "get_batch_on_this_tp_rank"), reason="this Megatron-Core has no get_batch_on_this_tp_rank"
)

SEQ_LENGTH, TENSOR = 64, 2
KEYS = (
    *("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "max_seqlen"),
    *("cu_seqlens", "cu_seqlens_padded", "local_cp_size", "hybrid_cp_group"),
)


def tensor_rank(rank: int, meeting: str, folder: str, batches: list[dict[str, Any]]) -> None:
    """One tensor rank: rank 0 has the iterator's dictionaries, the other gets all by broadcast."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=TENSOR)
    received = []
    for given in batches:
        batch = {name: given.get(name) for name in KEYS} if rank == 0 else {}
        batch = utils.get_batch_on_this_tp_rank(
            batch,
            has_cu_seqlens=True,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            broadcast_src_rank=0,
            broadcast_group=distributed.group.WORLD,
            cp_size=1,
            tp_rank=rank,
            micro_batch_size=1,
            seq_length=SEQ_LENGTH,
            mtp_on_this_rank=False,
        )
        received.append(utils.flatten_batch_for_packed_sequences(batch))
    torch.save(received, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def received(micro_batches: list[MicroBatch], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("tensor-ranks")
    batches = list(map(megatron_lm.batch, micro_batches))
    spawn(tensor_rank, (str(folder / "meeting"), str(folder), batches), TENSOR)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt") for rank in range(TENSOR)]


def test_every_tensor_rank_has_the_row_and_its_offsets(micro_batches: list[MicroBatch], received: list[Any]) -> None:
    for of_rank in received:
        for mb, batch in zip(micro_batches, of_rank, strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(batch[name], getattr(mb, name)[None]), name
            assert batch["cu_seqlens"].tolist() == [mb.cu_seqlens_padded.tolist()]
            assert batch["max_seqlen"].tolist() == [mb.max_seqlen]


def test_a_shifted_offset_is_noticed(micro_batches: list[MicroBatch], received: list[Any]) -> None:
    for mb, batch in zip(micro_batches, received[1], strict=True):
        shifted = mb.cu_seqlens_padded.clone()
        shifted[1:-1] += 1
        assert len(shifted) < 3 or batch["cu_seqlens"].tolist() != [shifted.tolist()]
