"""What a packing mode counts of its oldest pending piece."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ConsumedUnit"]


class ConsumedUnit(IntEnum):
    """Unit in which a stream says how much of what it holds was packed already."""

    LOOKAHEAD = 0  # 1 where a lookahead is closed, and the packs of the rest of it are being given out
    SLOTS = 1  # of the oldest pending document, delivered already
    IDS = 2  # of the oldest pending document of an endless run, delivered already
