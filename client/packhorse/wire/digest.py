"""The digest that names a snapshot on the wire."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["digest_of"]


def digest_of(snapshot: bytes) -> bytes:
    """What names a snapshot: BLAKE2b, 16 bytes."""
    return blake2b(snapshot, digest_size=16).digest()
