"""Packed rows made with pencil and paper, so to say: no code of the packer, the server or the client takes part.

Shapes: n = ids of a sample, T = row width in slots, t = T / CP local slots, S = segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from packhorse import MicroBatch
from packhorse.contract.partition import Partition
from packhorse.rows.context_parallel import local_slots
from packhorse_service.demo.model import GPT, GPTSizes

IGNORE = -100
VOCABULARY = 50
DATA, CONTEXT = 2, 2
NUM_MICROBATCHES = 2
SAMPLES_PER_ROW = 3
WIDTH = 80  # slots: three samples fit, and most rows keep a tail of padding
ROWS = {"full step": 4, "one filler": 3, "mostly fillers": 1}  # of a step that has room for four
SIZES = GPTSizes(vocabulary=VOCABULARY, positions=WIDTH, width=16, heads=2, layers=2)
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """``mask`` says of each id whether predicting it is trained on."""

    ids: IntArray  # [n]
    mask: IntArray  # [n]


@dataclass(frozen=True)
class Row:
    """A whole packed row of T slots."""

    tokens: IntArray
    labels: IntArray
    loss_mask: IntArray
    position_ids: IntArray
    cu_seqlens: IntArray  # [S+1]
    cu_seqlens_padded: IntArray  # [S+1]


def make_rows(count: int) -> list[Row]:
    """The first ``count`` rows; they hold ``make_samples(count * SAMPLES_PER_ROW)``."""
    samples = make_samples(count * SAMPLES_PER_ROW)
    groups = [samples[first : first + SAMPLES_PER_ROW] for first in range(0, len(samples), SAMPLES_PER_ROW)]
    return [make_row(group, WIDTH, multiple=2 * CONTEXT) for group in groups]


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Samples of 2 to 24 ids. Every second one has a prompt that is not trained on."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        length = int(random.integers(2, 25))
        prompt = int(random.integers(0, length)) if number % 2 else 0
        samples.append(Sample(random.integers(1, VOCABULARY, length), (np.arange(length) >= prompt).astype(np.int64)))
    return samples


def make_row(samples: list[Sample], width: int, multiple: int) -> Row:
    """Lay ``samples`` one after another, each padded to ``multiple`` slots; what is left is a segment of padding."""
    row = Row(
        tokens=np.zeros(width, np.int64),
        labels=np.full(width, IGNORE),
        loss_mask=np.zeros(width, np.int64),
        position_ids=np.zeros(width, np.int64),
        cu_seqlens=np.zeros(1, np.int64),
        cu_seqlens_padded=np.zeros(1, np.int64),
    )
    logical, physical = [0], [0]
    for sample in samples:
        slots, start = len(sample.ids) - 1, physical[-1]
        end = start + slots
        row.tokens[start:end], row.labels[start:end] = sample.ids[:-1], sample.ids[1:]
        row.loss_mask[start:end] = sample.mask[1:]
        logical.append(logical[-1] + slots)
        physical.append(start + -(-slots // multiple) * multiple)
    if physical[-1] < width:
        logical.append(logical[-1])
        physical.append(width)
    for start, end in pairwise(physical):
        row.position_ids[start:end] = np.arange(end - start)
    return replace(row, cu_seqlens=np.array(logical), cu_seqlens_padded=np.array(physical))


def as_filler(row: Row) -> Row:
    """The same row with nothing to learn from."""
    return replace(row, labels=np.full_like(row.labels, IGNORE), loss_mask=np.zeros_like(row.loss_mask))


def deal(rows: list[Row]) -> list[list[Row]]:
    """The rows of one step for each data-parallel rank; fillers where there are too few."""
    dealt = rows + [as_filler(rows[0])] * (DATA * NUM_MICROBATCHES - len(rows))
    return [dealt[rank * NUM_MICROBATCHES :][:NUM_MICROBATCHES] for rank in range(DATA)]


def micro_batches(rows: list[Row], data: int, context: int) -> list[MicroBatch]:
    """What one rank gets of the step made of ``rows``."""
    return [
        _micro_batch(row, index, context, step_loss_tokens=sum(int(row.loss_mask.sum()) for row in rows))
        for index, row in enumerate(deal(rows)[data])
    ]


def _micro_batch(row: Row, index: int, context: int, step_loss_tokens: int) -> MicroBatch:
    slots = local_slots(Partition.ZIGZAG, row.cu_seqlens_padded, CONTEXT, context)
    return MicroBatch(
        tokens=torch.from_numpy(row.tokens[slots]),
        labels=torch.from_numpy(row.labels[slots]),
        loss_mask=torch.from_numpy(row.loss_mask[slots]).float(),
        position_ids=torch.from_numpy(row.position_ids[slots]),
        cu_seqlens=torch.from_numpy(row.cu_seqlens).int(),
        cu_seqlens_padded=torch.from_numpy(row.cu_seqlens_padded).int(),
        max_seqlen=int(np.diff(row.cu_seqlens_padded).max()),
        num_tokens=int(row.cu_seqlens[-1]),
        num_loss_tokens=int(row.loss_mask.sum()),
        local_loss_tokens=int(row.loss_mask[slots].sum()),
        step_tokens=0,  # nothing here reads it
        step_loss_tokens=step_loss_tokens,
        step=0,
        index=index,
        host_offsets=(row.cu_seqlens, row.cu_seqlens_padded),
        num_microbatches=NUM_MICROBATCHES,
        filler=not row.loss_mask.any(),
        ignore_index=IGNORE,
        row_digest=b"",
        partition=Partition.ZIGZAG,
        context_size=CONTEXT,
        context_rank=context,
        keys=tuple(("by hand", "", str(number)) for number, slots in enumerate(np.diff(row.cu_seqlens)) if slots),
    )


def unpacked(samples: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the samples run one by one, each alone in its row: what packing must not change."""
    model = make_model()
    supervised = sum(int(sample.mask[1:].sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        ids, mask = torch.from_numpy(sample.ids), torch.from_numpy(sample.mask)
        slots = len(ids) - 1
        logits = model(ids[:-1], torch.arange(slots), torch.tensor([0, slots]))
        loss = (F.cross_entropy(logits, ids[1:], reduction="none") * mask[1:]).sum() / supervised
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, gradients(model)


def make_model(context: torch.distributed.ProcessGroup | None = None) -> GPT:
    """The same model in every process, in float64. Weights are large, so that attention matters to the loss."""
    torch.manual_seed(0)
    model = GPT(SIZES, context).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    """Name → gradient of each parameter."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Of all gradients, element by element."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def whole_row_loss(model: GPT, row: Row, offsets: IntArray) -> torch.Tensor:
    """Loss of a row in one process, with attention within the segments that ``offsets``, [S+1], say."""
    logits = model(torch.from_numpy(row.tokens), torch.from_numpy(row.position_ids), torch.from_numpy(offsets))
    losses = F.cross_entropy(logits, torch.from_numpy(row.labels), reduction="none", ignore_index=IGNORE)
    return (losses * torch.from_numpy(row.loss_mask)).sum() / int(row.loss_mask.sum())
