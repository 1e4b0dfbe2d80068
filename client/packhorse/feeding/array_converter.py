"""Conversion to the arrays that a loop asked for; torch, an extra, is imported only where its tensors are wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ConfigError

__all__ = ["Arrays", "array_converter"]

Arrays = Literal["torch", "numpy"]


def array_converter(arrays: Arrays) -> Callable[[MicroBatch], MicroBatch]:
    """Return the function that turns rebuilt numpy arrays into those that the loop asked for."""
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
