"""Digests of a micro-batch as it was delivered: of exactly what arrived, and of its whole row computed again."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from packhorse import MicroBatch, ProtocolError

__all__ = ["local_digest", "verify_row_digest"]

DIGESTED = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "padding_mask")


def local_digest(micro_batch: MicroBatch) -> bytes:
    """Compute BLAKE2b, 16 bytes, of exactly what was delivered as numpy arrays, a slice or a whole row.

    Over step and index as little-endian int64, then each array that is there, in the order of ``DIGESTED``:
    its name, dtype and shape as a line of ASCII ``tokens int64 [256]``, and its little-endian bytes.
    """
    hashed = blake2b(np.array(micro_batch.position, "<i8").tobytes(), digest_size=16)
    for name in DIGESTED:
        array = getattr(micro_batch, name)
        if array is not None:
            hashed.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode("ascii"))
            hashed.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    return hashed.digest()


def verify_row_digest(micro_batch: MicroBatch) -> bool:
    """Return whether the row digest could be computed again: only whole rows have all of it.

    Raises ``ProtocolError`` where it is another than the header says.
    """
    if not micro_batch.holds_whole_row or micro_batch.tokens is None or micro_batch.labels is None:
        return False  # the digest is of the whole row
    computed = micro_batch.computed_digest()
    if computed != micro_batch.row_digest:
        raise ProtocolError(
            f"row digest of {tuple(micro_batch.position)} is {micro_batch.row_digest.hex()} by its header and "
            f"{computed.hex()} by its tensors: it was damaged between packing and here; --no-verify goes on"
        )
    return True
