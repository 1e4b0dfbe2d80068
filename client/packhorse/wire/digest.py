"""The digest that names a snapshot on the wire."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["digest_of"]


def digest_of(snapshot: bytes) -> bytes:
    """Return the 16 bytes that name a snapshot on the wire: its BLAKE2b digest."""
    return blake2b(snapshot, digest_size=16).digest()
