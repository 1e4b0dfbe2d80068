"""MicroBatch to torch tensors, on the host or a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from packhorse.microbatch import MicroBatch

__all__ = ["to_device", "to_torch"]

ARRAYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "padding_mask")


def to_torch(micro_batch: MicroBatch, *, pin: bool) -> MicroBatch:
    """numpy to torch: shared memory, or a copy into pinned memory where ``pin`` is set."""
    return _each(micro_batch, partial(_tensor, pin=pin))


def _each(micro_batch: MicroBatch, change: Callable[[Any], torch.Tensor]) -> MicroBatch:
    """A copy with every array that this rank holds changed."""
    held = {name: array for name in ARRAYS if (array := getattr(micro_batch, name)) is not None}
    changed: dict[str, Any] = {name: change(array) for name, array in held.items()}
    return replace(micro_batch, **changed)


def _tensor(array: np.ndarray[Any, Any], *, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin else tensor


def to_device(micro_batch: MicroBatch, device: Any, *, non_blocking: bool) -> MicroBatch:
    """A copy with every tensor on ``device``."""
    return _each(micro_batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def pinning_helps() -> bool:
    """Whether copies to a device can be asynchronous from pinned memory here."""
    return torch.cuda.is_available()
