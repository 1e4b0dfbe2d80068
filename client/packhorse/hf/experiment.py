"""Experiment on a model: one sample of a packed row is changed, and no other sample may notice.

Shapes: T = 30 slots of a row of three samples, V = vocabulary. The middle sample is changed, so that what runs on to
later samples is seen as well as what looks ahead from earlier ones. Then each sample is run alone: its logits must be
those it had in the row, which positions, windows and chunks of the row would change.

The first is measured in training mode with the same random numbers, the second in evaluation mode, as dropout draws
other numbers for other shapes. Without gradients, so that none are left; gradient checkpointing runs nevertheless.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from packhorse.rules.transformers_families import Separation

__all__ = ["Measured", "ProbeRow", "make_row", "measure", "packed_inputs", "untouched"]

LENGTHS = (9, 11, 10)  # longer than the convolutions of state-space models; every sample has neighbours
SEED = 5
# Relative to what the changed sample's own logits moved. A real crossing moves others by 0.002 to 1.5; a mixture of
# experts groups its tokens otherwise for another row, which rounds otherwise: 1e-6 in float32.
CROSSING, DIFFERENCE = 1e-4, 1e-3
ROUNDINGS = 32  # units of the model's dtype that a sample alone may be off by, where that is more


@dataclass(frozen=True)
class ProbeRow:
    """Row of three samples: ids int64 [1, T], other ids that differ in the middle sample alone, and offsets."""

    ids: torch.Tensor
    other_ids: torch.Tensor
    offsets: tuple[int, ...]

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions int64 [1, T] that restart in each sample."""
        return torch.cat([torch.arange(end - start) for start, end in pairwise(self.offsets)])[None]


@dataclass(frozen=True)
class Measured:
    """Largest changes of logits, as shares of the change of the changed sample's own."""

    crossing: float
    """Change of another sample's logits."""
    difference: float
    """Difference between a sample in the row and alone."""
    resolution: float
    """What rounding in the model's dtype may amount to."""

    @property
    def separation(self) -> Separation:
        """Verdict; unknown where rounding hides the answer."""
        if self.crossing > max(CROSSING, self.resolution):
            return Separation.CROSSES
        if self.difference > max(DIFFERENCE, self.resolution):
            return Separation.DIFFERS
        in_doubt = self.crossing > CROSSING or not self.resolution < 1
        return Separation.UNKNOWN if in_doubt else Separation.SEPARATE


def make_row(ids: torch.Tensor) -> ProbeRow:
    """Draw a row from ids [N], at least two, that a text may have; always the same."""
    generator = torch.Generator().manual_seed(SEED)
    offsets = tuple(sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1))
    drawn = torch.randint(len(ids), (1, offsets[-1]), generator=generator)
    moved = torch.randint(1, len(ids), drawn.shape, generator=generator)
    moved[:, : offsets[1]] = moved[:, offsets[2] :] = 0
    return ProbeRow(ids[drawn], ids[(drawn + moved) % len(ids)], offsets)


def packed_inputs(row: ProbeRow, ids: torch.Tensor, position_rows: int) -> dict[str, Any]:
    """Return what ``arguments`` gives for the row, with its positions in 1 row, [1, T], or in 4, [4, 1, T]."""
    offsets = torch.tensor(row.offsets, dtype=torch.int32)
    longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    inputs = _inputs(ids, row.position_ids, position_rows)
    return {**inputs, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **longest}


def _inputs(ids: torch.Tensor, position_ids: torch.Tensor, position_rows: int) -> dict[str, Any]:
    positions = position_ids if position_rows == 1 else position_ids.expand(position_rows, *position_ids.shape)
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def measure(model: torch.nn.Module, row: ProbeRow, position_rows: int = 1) -> Measured:
    """Run the experiment and leave the model as it was. Raises whatever the model does."""
    with untouched(model):
        model.train()
        one, other = (_logits(model, packed_inputs(row, ids, position_rows)) for ids in (row.ids, row.other_ids))
        moves = (one - other).abs().amax(-1)
        _, start, end, _ = row.offsets
        own = float(moves[start:end].max())
        crossed = float(torch.cat([moves[:start], moves[end:]]).max())
        model.train(False)
        packed = _logits(model, packed_inputs(row, row.ids, position_rows))
        differs = max(float((alone - packed[at]).abs().max()) for at, alone in _each_alone(model, row, position_rows))
    if not own > 0:
        return Measured(0.0, 0.0, float("inf"))
    dtype = next(model.parameters()).dtype
    return Measured(crossed / own, differs / own, ROUNDINGS * torch.finfo(dtype).eps * float(one.abs().max()) / own)


def _each_alone(model: torch.nn.Module, row: ProbeRow, position_rows: int) -> Iterator[tuple[slice, torch.Tensor]]:
    for start, end in pairwise(row.offsets):
        positions = torch.arange(end - start)[None]
        yield slice(start, end), _logits(model, _inputs(row.ids[:, start:end], positions, position_rows))


def _logits(model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Logits float32 [T, V] of a call, always with the same random numbers."""
    device = next(model.parameters()).device
    torch.manual_seed(SEED)
    random.seed(SEED)
    placed = {name: value.to(device) if torch.is_tensor(value) else value for name, value in inputs.items()}
    logits = model(**placed).logits
    if logits.shape[:2] != inputs["input_ids"].shape:
        raise ValueError(f"logits of {tuple(logits.shape)} for ids of {tuple(inputs['input_ids'].shape)}")
    return logits[0].float()  # type: ignore[no-any-return]


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Put back, at the end, what calls of the model change: mode, buffers, attributes of modules, random numbers.

    Lists and dictionaries that a module changes in place are not.
    """
    modules = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    state = random.getstate()
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            for module, _, _ in modules:
                module._compiled_call_impl = None  # what is compiled is compiled for the training's shapes
            yield
        finally:
            for module, attributes, held in modules:
                module.__dict__.clear()
                module.__dict__.update(attributes)
                module._buffers.clear()
                module._buffers.update(held)
            for buffer, copy in buffers:
                buffer.copy_(copy)
            random.setstate(state)
