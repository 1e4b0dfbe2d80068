"""MicroBatch to torch: the only module of the client that imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from packhorse.microbatch import MicroBatch

__all__ = ["to_device", "to_torch"]

ARRAYS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded")


def to_torch(micro_batch: MicroBatch, *, pin: bool) -> MicroBatch:
    """numpy to torch: shared memory, or a copy into pinned memory where ``pin`` is set."""
    tensors: dict[str, Any] = {name: _tensor(getattr(micro_batch, name), pin=pin) for name in ARRAYS}
    return replace(micro_batch, **tensors)


def _tensor(array: np.ndarray[Any, Any], *, pin: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin else tensor


def to_device(micro_batch: MicroBatch, device: Any, *, non_blocking: bool) -> MicroBatch:
    """A copy with every tensor on ``device``."""
    moved: dict[str, Any] = {name: getattr(micro_batch, name).to(device, non_blocking=non_blocking) for name in ARRAYS}
    return replace(micro_batch, **moved)


def pinning_helps() -> bool:
    """Whether copies to a device can be asynchronous from pinned memory here."""
    return torch.cuda.is_available()
