"""A whole packed row, as the server builds it and as the row digest sees it.

Shapes: T = row width in slots, S = segments (an own-segment tail counts), R = real (logical) slots,
L = segments of at least one real slot.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.rounding import ceil_div
from packhorse.rows.geometry import Geometry
from packhorse.rows.payload import bits
from packhorse.rows.row_digest import finish_digest, hash_content, join, segment_ids

__all__ = ["Row", "SampleKey"]

Ids = npt.NDArray[np.unsignedinteger[Any]]  # 16 or 32 bits
Offsets = npt.NDArray[np.int32]
SampleKey = tuple[str, str, str]  # source, shard, key


@dataclass(frozen=True)
class Row:
    """Physical row of packed segments, before it is cut for context-parallel ranks.

    Every segment holds ``ids[:-1]`` of its sample; ``last_targets`` holds the id that each non-empty
    segment predicts last, so labels follow from tokens. ``labels`` is set where a source brings its own.

    ``joined_ids`` are the ids of all segments in one, [R+L], for whoever has them in one when it makes a row without
    own labels. The row's content is hashed from them at once, and they are not kept: to cut them out of the row
    again takes as long as half of what it takes to make one.
    """

    tokens: Ids  # [T] pad_id on padding
    last_targets: Ids  # [L]
    partial_loss_mask: npt.NDArray[np.uint8] | None  # [T] 0 on padding; None where every logical slot counts
    cu_seqlens: Offsets  # [S+1] logical
    cu_seqlens_padded: Offsets  # [S+1] physical; the last entry is T
    labels: Ids | None = None  # [T] arbitrary on padding
    keys: tuple[SampleKey, ...] = ()
    filler: bool = False
    num_tokens: int = field(init=False)  # R
    joined_ids: InitVar[Ids | None] = None

    def __post_init__(self, joined_ids: Ids | None) -> None:
        object.__setattr__(self, "num_tokens", self.cu_seqlens.item(-1))
        if joined_ids is not None:
            object.__setattr__(self, "content", self._hashed(joined_ids))

    @cached_property
    def geometry(self) -> Geometry:
        """Positions, segments and padding, from the offsets."""
        return Geometry(self.cu_seqlens, self.cu_seqlens_padded)

    @property
    def width(self) -> int:
        """Slots of the row, T."""
        return len(self.tokens)

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """Loss mask, [T]: 1 on slots that count in the loss, 0 on others and on padding."""
        return self.geometry.real.view(np.uint8) if self.partial_loss_mask is None else self.partial_loss_mask

    @cached_property
    def num_loss_tokens(self) -> int:
        """Number of slots that count in the loss."""
        return self.num_tokens if self.partial_loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @cached_property
    def mask_bits(self) -> npt.NDArray[np.uint8]:
        """Loss mask of all slots as bits, lowest first."""
        if self.partial_loss_mask is None and self._padded_at_the_end:
            return _ones_then_zeros(self.num_tokens, self.width)
        return bits(self.loss_mask)

    @property
    def _padded_at_the_end(self) -> bool:
        """True where no padding lies between logical slots."""
        return self.cu_seqlens.item(-2) == self.cu_seqlens_padded.item(-2)

    def targets(self) -> Ids:
        """Return the label of each slot, [T]; arbitrary on padding."""
        if self.labels is not None:
            return self.labels
        targets = np.empty_like(self.tokens)
        targets[:-1], targets[-1] = self.tokens[1:], 0
        targets[self.geometry.last_slots] = self.last_targets
        return targets

    def as_filler(self) -> Row:
        """Return the same row with nothing to train on: real tokens keep kernels and routers well defined."""
        return replace(self, partial_loss_mask=np.zeros(self.width, np.uint8), keys=(), filler=True)

    @cached_property
    def content(self) -> blake2b:
        """Hash of everything that the digest covers before step and index; to be copied before it is finished."""
        labels = None if self.filler or self.labels is not None else self.targets()
        return self._hashed(segment_ids(self.tokens, labels, self.geometry.segments))

    def _hashed(self, ids: npt.NDArray[Any]) -> blake2b:
        return hash_content(ids, self._real_mask_bits(), self.cu_seqlens, self.cu_seqlens_padded)

    def _real_mask_bits(self) -> npt.NDArray[np.uint8]:
        """Return the loss mask of the logical slots as bits."""
        if self._padded_at_the_end:
            return self.mask_bits[: ceil_div(self.num_tokens, 8)]
        return bits(join([self.loss_mask[at] for at in self.geometry.segments]))

    def digest(self, step: int, index: int) -> bytes:
        """Return the ``row_digest`` of this row as micro-batch ``index`` of ``step``."""
        own = None if self.filler or self.labels is None else [self.labels[at] for at in self.geometry.segments]
        return finish_digest(self.content.copy(), step, index, own)


@lru_cache(maxsize=64)
def _ones_then_zeros(ones: int, count: int) -> npt.NDArray[np.uint8]:
    """Return the bits of so many 1s, followed by 0s up to ``count``, read-only: most rows are full, or nearly."""
    packed = np.zeros(ceil_div(count, 8), np.uint8)
    full, more = divmod(ones, 8)
    packed[:full] = 0xFF
    if more:
        packed[full] = (1 << more) - 1
    packed.flags.writeable = False
    return packed
