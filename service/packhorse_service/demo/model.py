"""A small GPT for packed rows, whose context-parallel ranks exchange keys and values.

Two things make attention right on a packed row:

* a query sees the keys of its own segment up to its own slot, and the row's physical offsets say which
  (``segment_mask``);
* a rank holds only its own slots, so it gathers the others' keys and values before attention, and the
  gradients go back to where they came from (``GatherSlots``).

This is the plainest exact form, with a dense mask. Kernels for real sizes take the same offsets.

Shapes: T = row width in slots, t = T / CP local slots, S = segments, W = model width, H = heads,
D = W / H, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from packhorse.contract.partition import Partition
from packhorse.rows.context_parallel import local_slots

__all__ = ["GPT", "GPTSizes", "segment_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSizes:
    """Sizes of the model. ``positions`` is at least the contract's ``seq_length``."""

    vocabulary: int
    positions: int
    width: int = 96
    heads: int = 2
    layers: int = 2


class GPT(nn.Module):
    """Decoder-only transformer over one packed row.

    ``context`` is the group of ranks that share a row; ``None`` where each rank holds whole rows.
    """

    def __init__(self, sizes: GPTSizes, context: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.positions, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, context) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        nn.init.normal_(self.position.weight, std=0.1)  # a small part of the input at first

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Logits [t, V] of the local slots: ``tokens`` and ``position_ids`` int64 [t], offsets int [S+1]."""
        group = self.context
        mask = segment_mask(cu_seqlens_padded, group.size(), group.rank()) if group else segment_mask(cu_seqlens_padded)
        x = self.embed(tokens) + self.position(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each normalised before and added after."""

    def __init__(self, sizes: GPTSizes, context: dist.ProcessGroup | None) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.context = sizes.heads, context
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[t, W] → [t, W] under ``mask`` bool [t, T]."""
        x = x + self.out(self.attention(self.before_attention(x), mask))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        """[t, W] → [t, W]: local queries, keys and values of the whole row."""
        queries, keys_values = self.qkv(x).unflatten(1, (3, self.heads, -1)).split([1, 2], dim=1)  # [t, 1 | 2, H, D]
        if self.context is not None:
            keys_values = GatherSlots.apply(keys_values, self.context)  # type: ignore[no-untyped-call]  # [T, 2, H, D]
        (q,), (k, v) = queries.permute(1, 2, 0, 3), keys_values.permute(1, 2, 0, 3)  # [H, t | T, D]
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return attended.transpose(0, 1).flatten(1)


class GatherSlots(torch.autograd.Function):
    """[t, …] of every rank of the group → [T, …], rank 0's slots first."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Every rank used every slot: sum what all of them found, keep the part of the local slots."""
        total = gradient.clone(memory_format=torch.contiguous_format)  # autograd may use the original elsewhere
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


def segment_mask(cu_seqlens_padded: Tensor, context: int = 1, rank: int = 0) -> Tensor:
    """Return which keys each local query may see: those of its own segment, up to its own slot.

    ``cu_seqlens_padded``: int [S+1], physical offsets. Returns bool [t, T], its columns in the order of
    ``GatherSlots``. Padding belongs to a segment too and a slot always sees itself, so no row of the mask
    is empty: an empty one would make the softmax NaN.
    """
    offsets = cu_seqlens_padded.numpy()
    held = [local_slots(Partition.ZIGZAG, offsets, context, r) for r in range(context)]
    queries, keys = held[rank][:, None], np.concatenate(held)[None, :]
    segment = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))  # [T]
    return torch.from_numpy((segment[queries] == segment[keys]) & (keys <= queries))
