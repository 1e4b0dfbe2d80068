"""A whole packed row, as the server builds it and as the row digest sees it.

Shapes: T = row width in slots, S = segments (an own-segment tail counts), R = real (logical) slots,
L = segments of at least one real slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.rows.payload import bits, narrowest

__all__ = ["Geometry", "Row", "SampleKey", "row_digest"]

Ids = npt.NDArray[np.unsignedinteger[Any]]  # 16 or 32 bits
Offsets = npt.NDArray[np.int32]
SampleKey = tuple[str, str, str]  # source, shard, key

PLACE = Struct("<qq")  # step, index
IDS, OFFSETS = np.dtype("<u4"), np.dtype("<i4")  # as they are hashed


@lru_cache(maxsize=4)
def _counting(count: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """0 … count-1, read-only, as narrow as they fit: most rows have one width."""
    numbers: npt.NDArray[np.unsignedinteger[Any]] = np.arange(count, dtype=narrowest(count))
    numbers.flags.writeable = False
    return numbers


class Geometry:
    """What follows from the two offset arrays of a row, computed once and only when asked."""

    def __init__(self, cu_seqlens: npt.NDArray[Any], cu_seqlens_padded: npt.NDArray[Any]) -> None:
        logical, physical = cu_seqlens.astype(np.int64), cu_seqlens_padded.astype(np.int64)
        self.physical = physical
        self.starts = physical[:-1]
        self.lengths = logical[1:] - logical[:-1]
        self.padded_lengths = physical[1:] - self.starts
        self.ends = self.starts + self.lengths  # of the logical slots
        self.gaps = self.padded_lengths - self.lengths  # padding behind each segment
        self.width = int(physical[-1])

    @cached_property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """[T] restart at 0 in each segment and continue through its padding."""
        return self.write_positions(np.empty(self.width, np.int64))

    def write_positions(self, out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``position_ids`` into an array of [T]; worked out in narrow integers, of which many fit into the cache."""
        slots = _counting(self.width)
        positions = self.starts.astype(slots.dtype).repeat(self.padded_lengths)
        np.subtract(slots, positions, out=positions)
        out[:] = positions
        return out

    @cached_property
    def segments(self) -> list[slice]:
        """The logical slots of each non-empty segment."""
        occupied = self.lengths > 0
        return list(map(slice, self.starts[occupied].tolist(), self.ends[occupied].tolist()))

    @property
    def padding(self) -> list[slice]:
        """The slots of each stretch of padding."""
        (padded,) = self.gaps.nonzero()
        if not len(padded):
            return []
        begins = self.ends[padded]
        return list(map(slice, begins.tolist(), (begins + self.gaps[padded]).tolist()))

    @cached_property
    def real(self) -> npt.NDArray[np.bool_]:
        """[T] True on logical slots, False on padding."""
        real = np.ones(self.width, np.bool_)
        for stretch in self.padding:
            real[stretch] = False
        return real

    @property
    def last_slots(self) -> npt.NDArray[np.int64]:
        """[L] the slot of each non-empty segment's last logical position."""
        return self.ends[self.lengths.nonzero()] - 1


@dataclass(frozen=True)
class Row:
    """One physical row before it is cut for context-parallel ranks.

    Every segment holds ``ids[:-1]`` of its sample; ``last_targets`` holds the id that each non-empty
    segment predicts last, so labels follow from tokens. ``labels`` is set where a source brings its own.
    """

    tokens: Ids  # [T] pad_id on padding
    last_targets: Ids  # [L]
    partial_loss_mask: npt.NDArray[np.uint8] | None  # [T] 0 on padding; None where every logical slot is
    cu_seqlens: Offsets  # [S+1] logical
    cu_seqlens_padded: Offsets  # [S+1] physical; the last entry is T
    labels: Ids | None = None  # [T] arbitrary on padding
    keys: tuple[SampleKey, ...] = ()
    filler: bool = False
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.cu_seqlens.item(-1))

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry(self.cu_seqlens, self.cu_seqlens_padded)

    @property
    def width(self) -> int:
        return len(self.tokens)

    @cached_property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """[T] 1 on supervised slots, 0 on others and on padding."""
        return self.geometry.real.view(np.uint8) if self.partial_loss_mask is None else self.partial_loss_mask

    @property
    def num_loss_tokens(self) -> int:
        return self.num_tokens if self.partial_loss_mask is None else self._counted_loss_tokens

    @cached_property
    def _counted_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def mask_bits(self) -> npt.NDArray[np.uint8]:
        """The loss mask as bits."""
        if self.partial_loss_mask is None and self._padded_at_the_end:
            return _ones_then_zeros(self.num_tokens, self.width)
        return self._mask_bits

    @cached_property
    def _mask_bits(self) -> npt.NDArray[np.uint8]:
        return bits(self.loss_mask)

    @property
    def _padded_at_the_end(self) -> bool:
        """Whether no padding lies between logical slots."""
        return self.cu_seqlens.item(-2) == self.cu_seqlens_padded.item(-2)

    def targets(self) -> Ids:
        """[T] the label of each slot; arbitrary on padding."""
        if self.labels is not None:
            return self.labels
        targets = np.empty_like(self.tokens)
        targets[:-1], targets[-1] = self.tokens[1:], 0
        targets[self.geometry.last_slots] = self.last_targets
        return targets

    def as_filler(self) -> Row:
        """The same row with nothing to train on: real tokens keep kernels and routers well defined."""
        return replace(self, partial_loss_mask=np.zeros(self.width, np.uint8), keys=(), filler=True)

    @cached_property
    def content(self) -> blake2b:
        """What ``row_digest`` hashes before step and index."""
        labels = None if self.filler or self.labels is not None else self.targets()
        segments = self.geometry.segments
        return _content(_ids(self.tokens, labels, segments), self._real_mask_bits(), *self._offsets)

    def hash_now(self, ids: Ids) -> None:
        """Make ``content`` from the ids of all segments in one, [R+L], which need not be kept for it."""
        self.__dict__["content"] = _content(ids, self._real_mask_bits(), *self._offsets)

    @property
    def _offsets(self) -> tuple[Offsets, Offsets]:
        return self.cu_seqlens, self.cu_seqlens_padded

    def _real_mask_bits(self) -> npt.NDArray[np.uint8]:
        """The loss mask of the logical slots, as bits."""
        if self._padded_at_the_end:
            return self.mask_bits[: -(-self.num_tokens // 8)]
        return bits(_joined([self.loss_mask[at] for at in self.geometry.segments]))

    def digest(self, step: int, index: int) -> bytes:
        """``row_digest`` of this row, in its place."""
        own = None if self.filler or self.labels is None else [self.labels[at] for at in self.geometry.segments]
        return _digest(self.content.copy(), step, index, own)


def row_digest(
    tokens: npt.NDArray[Any],
    labels: npt.NDArray[Any] | None,
    loss_mask: npt.NDArray[Any],
    cu_seqlens: npt.NDArray[Any],
    cu_seqlens_padded: npt.NDArray[Any],
    *,
    step: int,
    index: int,
    own_labels: bool = False,
) -> bytes:
    """BLAKE2b, 16 bytes, of a whole row: equal for every view, wire type and delivered dtype.

    Over, in this order and little-endian: the ids of each segment without padding (its tokens, then its
    last target) as uint32; the loss mask of the logical slots as bits, lowest first; logical, then
    physical offsets as int32; step and index as int64. Where a source brings labels of its own, the ids
    are the tokens alone and the labels of the logical slots follow at the end as uint32. A filler
    (``labels`` is None) has no targets: its ids are the tokens alone.
    """
    segments = Geometry(np.asarray(cu_seqlens), np.asarray(cu_seqlens_padded)).segments
    ids = _ids(tokens, None if own_labels else labels, segments)
    mask = bits(_joined([loss_mask[at] for at in segments]))
    own = [labels[at] for at in segments] if labels is not None and own_labels else None
    return _digest(_content(ids, mask, np.asarray(cu_seqlens), np.asarray(cu_seqlens_padded)), step, index, own)


def _ids(
    tokens: npt.NDArray[Any], labels: npt.NDArray[Any] | None, segments: Sequence[slice]
) -> npt.NDArray[np.generic]:
    """The tokens of each segment, and its last target where ``labels`` are given."""
    if labels is None:
        return _joined([tokens[at] for at in segments])
    return _joined(list(chain.from_iterable((tokens[at], labels[at.stop - 1 : at.stop]) for at in segments)))


def _content(
    ids: npt.NDArray[Any],
    mask_bits: npt.NDArray[np.uint8],
    cu_seqlens: npt.NDArray[Any],
    cu_seqlens_padded: npt.NDArray[Any],
) -> blake2b:
    state = blake2b(ids.astype(IDS, copy=False).data, digest_size=16)
    offsets = cu_seqlens.astype(OFFSETS, copy=False), cu_seqlens_padded.astype(OFFSETS, copy=False)
    buffers: tuple[Any, ...] = mask_bits, *offsets  # as arrays are, whatever a type checker knows of them
    state.update(b"".join(buffers))
    return state


def _digest(content: blake2b, step: int, index: int, own_labels: list[npt.NDArray[Any]] | None) -> bytes:
    content.update(PLACE.pack(step, index))
    if own_labels is not None:
        content.update(_joined(own_labels).astype(IDS, copy=False).data)
    return content.digest()


@lru_cache(maxsize=64)
def _ones_then_zeros(ones: int, count: int) -> npt.NDArray[np.uint8]:
    """The bits of so many 1s, followed by 0s up to ``count``, read-only: most rows are full, or nearly."""
    packed = np.zeros(-(-count // 8), np.uint8)
    full, more = divmod(ones, 8)
    packed[:full] = 0xFF
    if more:
        packed[full] = (1 << more) - 1
    packed.flags.writeable = False
    return packed


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
