"""MicroBatch to torch tensors, on the host or a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from packhorse.codec.microbatch import MicroBatch

__all__ = ["to_device", "to_torch"]

ARRAYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "padding_mask")


def to_torch(micro_batch: MicroBatch, *, pin: bool) -> MicroBatch:
    """Convert numpy to torch: shared memory, or a copy into pinned memory where ``pin`` is set."""
    return _each(micro_batch, _pinned if pin else torch.from_numpy)


def _each(micro_batch: MicroBatch, change: Callable[[Any], torch.Tensor]) -> MicroBatch:
    """Return a copy with every array that this rank holds changed."""
    changed: dict[str, Any] = {
        name: change(array) for name in ARRAYS if (array := getattr(micro_batch, name)) is not None
    }
    return replace(micro_batch, **changed)


def _pinned(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def to_device(micro_batch: MicroBatch, device: Any, *, non_blocking: bool) -> MicroBatch:
    """Return a copy with every tensor on ``device``."""
    return _each(micro_batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def pinning_helps() -> bool:
    """Return whether copies to a device can be asynchronous from pinned memory here."""
    return torch.cuda.is_available()
