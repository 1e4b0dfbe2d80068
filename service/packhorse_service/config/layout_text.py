"""A parallel layout as text on the command line: data=2,context=2."""

from __future__ import annotations

from packhorse import ConfigError, ParallelLayout
from packhorse.contract.layout import AXES

__all__ = ["layout_of"]


def layout_of(text: str) -> ParallelLayout:
    """Return ``data=2,context=2`` as a layout; sizes left out are 1. Raises ``ConfigError``."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal():
            raise ConfigError(
                f"--layout={text!r}: {part!r} must be one of {', '.join(AXES)} with its size, each once, "
                "as in data=2,context=2; sequence parallelism and other orders need --trainer"
            )
        sizes[axis] = int(size)
    data, context, tensor, pipeline = (sizes.get(axis, 1) for axis in AXES)
    return ParallelLayout(data=data, context=context, tensor=tensor, pipeline=pipeline)
