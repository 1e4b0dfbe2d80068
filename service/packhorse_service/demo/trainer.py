"""Train a small GPT on packed rows, data- and context-parallel: the script to copy. Every rank runs it.

    packhorse serve feed.yaml
    torchrun --nproc-per-node 4 -m packhorse_service.demo.trainer --endpoint tcp://127.0.0.1:5555

Packhorse takes nine lines of it: the import, the contract, the ``Feed`` and the loop over its steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from packhorse import BatchContract, Feed, LossReduction, MicroBatch, ParallelLayout, Partition
from packhorse_service.demo.model import GPT, GPTSizes
from packhorse_service.demo.step_lines import Reporter


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # several ranks share this machine's cores
    dist.init_process_group("gloo")
    # Row-major: rank = data · CP + context, which is the default order of a layout too.
    mesh = init_device_mesh("cpu", (args.data, args.context), mesh_dim_names=("data", "context"))
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(GPTSizes(vocabulary=args.vocabulary, positions=args.seq_length), mesh["context"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    contract = BatchContract(
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        partition=Partition.ZIGZAG,  # each rank gets its slots of the row
        loss_reduction=LossReduction.STEP_TOKENS,  # backward() divides by the supervised tokens of the step
    )
    with Feed(args.endpoint, contract=contract, layout=ParallelLayout(data=args.data, context=args.context)) as feed:
        report = Reporter(args.report, feed)
        for step in islice(feed.steps(), args.steps):
            loss = backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            report.write(step, loss)
    dist.destroy_process_group()


def backward(model: GPT, step: Sequence[MicroBatch]) -> float:
    """Give ``model`` the gradients of one step, those of all ranks; return the step's loss per supervised token.

    ``step_loss_tokens`` counts the supervised tokens of the whole step over all data-parallel ranks. Divided
    by it, losses and gradients of the ranks only have to be summed: nothing is averaged, and no collective counts.
    """
    total = torch.zeros(())
    for mb in step:
        logits = model(mb.tokens, mb.position_ids, mb.cu_seqlens_padded)
        losses = F.cross_entropy(logits, mb.labels, reduction="none", ignore_index=mb.ignore_index)
        loss = (losses * mb.loss_mask).sum() / max(mb.step_loss_tokens, 1)
        loss.backward()
        total = total + loss.detach()
    sum_over_ranks([total, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)])
    return float(total)


def sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, all of them in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on packed rows.")
    parser.add_argument("--endpoint", required=True, help="where packhorse serve listens")
    parser.add_argument("--steps", type=int, help="stop after so many; default: when the stream ends")
    parser.add_argument("--data", type=int, default=2, help="data-parallel size")
    parser.add_argument("--context", type=int, default=2, help="context-parallel size")
    parser.add_argument("--seq-length", type=int, default=1024, help="slots of a row")
    parser.add_argument("--global-batch-size", type=int, default=4, help="rows of a step")
    parser.add_argument("--vocabulary", type=int, default=2048, help="ids of the tokenizer")
    parser.add_argument("--report", type=Path, default=Path(), help="folder for progress and the first rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
