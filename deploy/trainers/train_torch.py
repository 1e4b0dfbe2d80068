"""Train on packed rows with plain PyTorch: one process a GPU under torchrun, or on CPUs. The loop to copy.

    packhorse serve feed.yaml
    torchrun --nproc-per-node 8 train_torch.py --endpoint tcp://127.0.0.1:5555 --seq-length 8192 --global-batch-size 64

What Packhorse takes of it: the contract, the ``Feed``, the loop over its steps, the denominator of the loss, and the
feed's state in the checkpoint. Started again it goes on from the last checkpoint. SIGTERM, which schedulers send
before the end, makes all ranks stop behind the same step with a checkpoint. Run on CPUs by the tests, not on a GPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from packhorse import BatchContract, Feed, LossReduction, MicroBatch, ParallelLayout

log = logging.getLogger("train")


def main() -> None:
    args = arguments()
    device = join_the_others()
    stop = Stop(device)
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(TinyGPT(args.vocabulary, args.seq_length).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    contract = BatchContract(
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        loss_reduction=LossReduction.STEP_TOKENS,  # the loop divides by the trained tokens of the step
    )
    layout = ParallelLayout(data=dist.get_world_size())
    with Feed(args.endpoint, contract=contract, layout=layout) as feed:
        checkpoint = Checkpoint(args.checkpoints / "last.pt", model.module, optimizer, feed)
        checkpoint.load(device)
        for step in feed.steps():
            loss = backward(model, step, device)
            optimizer.step()
            optimizer.zero_grad()
            trained = step[0].step + 1
            log.info("step %d: loss %.4f, %d tokens", step[0].step, loss, step[0].step_loss_tokens)
            stopping = stop.asked()
            if stopping or trained % args.save_every == 0:
                checkpoint.save()
            if stopping:
                log.info("stopped by SIGTERM, with a checkpoint behind step %d", step[0].step)
                break
        else:
            checkpoint.save()
            log.info("the stream has ended")
    dist.destroy_process_group()


def backward(model: DistributedDataParallel, step: Sequence[MicroBatch], device: torch.device) -> float:
    """Accumulate the gradients of one step; return its loss per trained token.

    ``step_loss_tokens`` counts the trained tokens of the step over all ranks, so no collective has to. DDP averages
    gradients over ranks, and the loss is a sum over them: hence the factor.
    """
    ranks = dist.get_world_size()
    total = torch.zeros((), device=device)
    for mb in (mb.to(device) for mb in step):
        # Only the last backward pass of the step has the ranks exchange gradients.
        with nullcontext() if mb.index == len(step) - 1 else model.no_sync():
            logits = model(mb.tokens, mb.position_ids, mb.cu_seqlens_padded)
            losses = F.cross_entropy(logits, mb.labels, reduction="none", ignore_index=mb.ignore_index)
            loss = (losses * mb.loss_mask).sum() / max(mb.step_loss_tokens, 1)  # 0: nothing to train on
            (loss * ranks).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total)


class Checkpoint:
    """Model, optimizer and the place in the data, in one file that is whole at any moment."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed) -> None:
        self._path, self._model, self._optimizer, self._feed = path, model, optimizer, feed

    def load(self, device: torch.device) -> None:
        """Go on from the file, if it is there; on all ranks, before the first step."""
        if not self._path.exists():
            return
        saved: dict[str, Any] = torch.load(self._path, map_location=device, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._feed.load_state_dict(saved["feed"])
        log.info("going on at step %d", self._feed.position.step)

    def save(self) -> None:
        """Behind a step all ranks hold the same, so rank 0 writes it."""
        if dist.get_rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            torch.save({**state, "feed": self._feed.state_dict()}, part)
            part.replace(self._path)


class Stop:
    """Whether SIGTERM has come, to any rank: they must all leave behind the same step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self._received = True

    def asked(self) -> bool:
        """Collective: ask it once a step, on all ranks."""
        flag = torch.tensor(self._received, dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def join_the_others() -> torch.device:
    """Meet the other ranks as torchrun arranged it; the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    level = logging.INFO if dist.get_rank() == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s  %(message)s", datefmt="%H:%M:%S")
    return device


# The model: yours, in its place -----------------------------------------------------------------------


class TinyGPT(nn.Module):
    """A decoder of one layer over one packed row. T = slots, S = segments, W = width, V = vocabulary."""

    def __init__(self, vocabulary: int, positions: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Logits [T, V]: ``tokens`` and ``position_ids`` int64 [T], physical offsets int32 [S+1]."""
        x = self.embed(tokens) + self.position(position_ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)  # each [heads, T, dim]
        # The plainest exact form. At real sizes a variable-length kernel takes the offsets: packhorse.adapters.varlen.
        mask = same_segment(cu_seqlens_padded, len(tokens)).tril()
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        logits: Tensor = self.head(x + self.mlp(x))
        return logits


def same_segment(offsets: Tensor, slots: int) -> Tensor:
    """Bool [T, T]: whether two slots belong to one segment. Attention across segments would mix samples."""
    segment = torch.bucketize(torch.arange(slots, device=offsets.device), offsets[1:], right=True)
    return segment[:, None] == segment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny GPT on packed rows, data-parallel.")
    endpoint = os.environ.get("PACKHORSE_ENDPOINT")
    parser.add_argument("--endpoint", default=endpoint, help="of packhorse serve; default: $PACKHORSE_ENDPOINT")
    parser.add_argument("--seq-length", type=int, required=True, help="slots of a row, as the server packs them")
    parser.add_argument("--global-batch-size", type=int, required=True, help="rows of a step, over all ranks")
    parser.add_argument("--vocabulary", type=int, default=50304, help="ids of the tokenizer")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder that all ranks see")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    if not args.endpoint:
        parser.error("--endpoint is missing, and PACKHORSE_ENDPOINT is not set")
    return args


if __name__ == "__main__":
    main()
