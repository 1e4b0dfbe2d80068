"""What makes two servers offer the same stream: named parts, each with a digest.

The parts stay apart so that a difference can be named. Shards count by their name in the source and their
size, never by path, inode or time: the same data on another machine is the same stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

__all__ = ["StreamIdentity"]

PART_BYTES = 8


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """``order`` holds what decides the samples and their order, ``rows`` what decides packs and ranks."""

    order: Mapping[str, bytes]
    rows: Mapping[str, bytes]

    @classmethod
    def of(cls, order: Mapping[str, object], rows: Mapping[str, object]) -> StreamIdentity:
        """From JSON-able descriptions of each part."""
        return cls(_digests(order), _digests(rows))

    @property
    def fingerprint(self) -> bytes:
        """16 bytes: equal only where every position has the same bytes."""
        parts = {**self.order, **self.rows}
        return blake2b(b"".join(name.encode() + parts[name] for name in sorted(parts)), digest_size=16).digest()

    def packed_order(self) -> bytes:
        """The digests of the parts that a snapshot depends on, in order of their names."""
        return b"".join(self.order[name] for name in sorted(self.order))

    def differing(self, packed_order: bytes) -> list[str]:
        """Names of the parts of ``order`` that differ from another stream's ``packed_order``."""
        return [
            name
            for i, name in enumerate(sorted(self.order))
            if packed_order[i * PART_BYTES : (i + 1) * PART_BYTES] != self.order[name]
        ]


def _digests(parts: Mapping[str, object]) -> dict[str, bytes]:
    return {
        name: blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=PART_BYTES).digest()
        for name, part in parts.items()
    }
