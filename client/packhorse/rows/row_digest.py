"""Digest of a whole row: what proves to a reader that it got the row that the server made.

BLAKE2b, 16 bytes, over, in this order and little-endian: the ids of each segment without padding (its tokens, then
its last target) as uint32; the loss mask of the logical slots as bits, lowest first; logical, then physical offsets
as int32; step and index as int64. Where a source brings labels of its own, the ids are the tokens alone and the
labels of the logical slots follow at the end as uint32. A filler has no targets: its ids are the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.rows.geometry import Geometry
from packhorse.rows.payload import bits

__all__ = ["finish_digest", "hash_content", "join", "row_digest", "segment_ids"]

POSITION = Struct("<qq")  # step, index
IDS, OFFSETS = np.dtype("<u4"), np.dtype("<i4")  # as they are hashed


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
    """Return the digest, 16 bytes, of a whole row: equal for every view, wire type and delivered dtype.

    ``tokens``, ``labels`` and ``loss_mask`` are [T], the offsets [S+1]. ``labels`` is None for a filler;
    ``own_labels`` says that a source brought them.
    """
    segments = Geometry(np.asarray(cu_seqlens), np.asarray(cu_seqlens_padded)).segments
    ids = segment_ids(tokens, None if own_labels else labels, segments)
    mask = bits(join([loss_mask[at] for at in segments]))
    content = hash_content(ids, mask, np.asarray(cu_seqlens), np.asarray(cu_seqlens_padded))
    own = [labels[at] for at in segments] if labels is not None and own_labels else None
    return finish_digest(content, step, index, own)


def segment_ids(
    tokens: npt.NDArray[Any], labels: npt.NDArray[Any] | None, segments: Sequence[slice]
) -> npt.NDArray[np.generic]:
    """Return the tokens of each segment, and behind them its last target where ``labels`` are given."""
    if labels is None:
        return join([tokens[at] for at in segments])
    return join(list(chain.from_iterable((tokens[at], labels[at.stop - 1 : at.stop]) for at in segments)))


def hash_content(
    ids: npt.NDArray[Any],
    mask_bits: npt.NDArray[np.uint8],
    cu_seqlens: npt.NDArray[Any],
    cu_seqlens_padded: npt.NDArray[Any],
) -> blake2b:
    """Hash everything that does not depend on where the row stands in the stream."""
    state = blake2b(ids.astype(IDS, copy=False).data, digest_size=16)
    offsets = cu_seqlens.astype(OFFSETS, copy=False), cu_seqlens_padded.astype(OFFSETS, copy=False)
    buffers: tuple[Any, ...] = mask_bits, *offsets  # as arrays are, whatever a type checker knows of them
    state.update(b"".join(buffers))
    return state


def finish_digest(content: blake2b, step: int, index: int, own_labels: list[npt.NDArray[Any]] | None) -> bytes:
    """Return the digest of hashed content, which is changed, at its place; ``own_labels`` are by segment."""
    content.update(POSITION.pack(step, index))
    if own_labels is not None:
        content.update(join(own_labels).astype(IDS, copy=False).data)
    return content.digest()


def join(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the parts as one array, of no entries where there are none."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)
