"""Pieces in which nothing is trained on: their whole loss mask is 0, and a source's policy says what becomes of them.

Looked at is what was cut, not the sample: of one that is split, some pieces may be its prompt alone. A part of such a
piece has nothing to train on either, so it makes no difference whether a piece is dropped before it is cut once more
or its parts behind that: what was drawn still follows from the data and the cut lengths alone.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.over_length import Range

__all__ = ["Unsupervised", "has_untrained_sample", "is_supervised"]


class Unsupervised(StrEnum):
    """Policy for a sample, or a piece of one that is over length, of which nothing is trained on."""

    KEEP = "keep"  # it is packed like any other: read, and no part of the loss
    DROP = "drop"
    ERROR = "error"


def is_supervised(block: TokenBlock, part: Range, overlap: int) -> bool:
    """Return whether one target at least of a range of ids is trained on; its first ``overlap`` ids are no targets."""
    begin, end = part
    return block.loss_mask is None or bool(block.loss_mask[begin + overlap : end].any())


def has_untrained_sample(block: TokenBlock, overlap: int) -> bool:
    """Return whether a block has a sample of which nothing is trained on."""
    mask = block.loss_mask
    if mask is None:
        return False
    trained = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    begins = np.minimum(block.offsets[:-1] + overlap, block.offsets[1:])
    return bool((trained[block.offsets[1:]] == trained[begins]).any())
