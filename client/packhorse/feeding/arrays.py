"""Which arrays a loop asked for. torch is an extra: it is imported only where its tensors are wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ConfigError

__all__ = ["Arrays", "finisher"]

Arrays = Literal["torch", "numpy"]


def finisher(arrays: Arrays) -> Callable[[MicroBatch], MicroBatch]:
    """What turns rebuilt numpy arrays into what the loop asked for."""
    if arrays == "numpy":
        return lambda micro_batch: micro_batch
    if arrays != "torch":
        raise ConfigError(f"arrays={arrays!r} must be 'torch' or 'numpy'")
    try:
        from packhorse.feeding.torch_arrays import pinning_helps, to_torch
    except ImportError as error:
        raise ConfigError(
            "arrays='torch' needs torch: pip install 'packhorse[torch]', or pass arrays='numpy'"
        ) from error
    return partial(to_torch, pin=pinning_helps())
