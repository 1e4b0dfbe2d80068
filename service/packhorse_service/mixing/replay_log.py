"""Places in the order of samples from which a stream can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse_service.mixing.order import OrderCursor
from packhorse_service.mixing.over_length import CutLength
from packhorse_service.mixing.prefetched_run import DeferredCursor

__all__ = ["CHECKSUM_MASK", "ReplayPoint", "StreamCursor"]


CHECKSUM_MASK = 0xFFFFFFFF


class ReplayPoint(NamedTuple):
    """A place in the order, and what lies before it. Most are looked at by nobody: only then the order is made."""

    at: DeferredCursor
    draws: int = 0
    pieces: int = 0
    checksum: int = 0  # sum of those of the blocks of all these draws


class StreamCursor(NamedTuple):
    """Where to resume: the order some way before the oldest pending piece, and what was packed since."""

    order: OrderCursor
    cut_lengths: Sequence[CutLength]  # the draws since
    packed: npt.NDArray[np.uint8]  # [pieces drawn since] 1 = packed
    checksum: int = 0  # sum of those of the blocks of all draws since, 32 bits of it
