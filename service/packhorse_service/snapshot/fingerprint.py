"""What makes two servers offer the same stream: named parts, each with a digest.

The parts stay apart so that a difference can be named, and a change be asked for by name. Shards count by
their name in the source and their size, never by path, inode or time: the same data on another machine is
the same stream.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from packhorse.errors import ContractError

__all__ = ["ANEW", "CHANGES", "StreamIdentity"]

PART_BYTES = 8

ANEW = frozenset({"blocks", "order"})  # without these a place in the data has no meaning

# part of the order -> what to expect of a stream that goes on with it changed
CHANGES: dict[str, str] = {
    "blocks": "every source begins its data anew",
    "date": "samples are rendered with the new date",
    "manifest": "shards are taken by their number in the list, whatever their names and sizes are",
    "mixture": "weights and epochs are the new ones, and no source catches up for what was before",
    "order": "every source begins its data anew",
    "over_length": "samples that are over length or unusable are treated by the new policies",
    "rendering": "samples are decoded by the new format and template",
    "tokenizer": "samples have the ids of the new tokenizer",
}


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

    def differing(self, packed_order: bytes) -> dict[str, str]:
        """Parts of ``order`` that differ from another stream's ``packed_order``: name -> the change, as asked for."""
        theirs = (packed_order[i * PART_BYTES : (i + 1) * PART_BYTES] for i in range(len(self.order)))
        named = zip(sorted(self.order), theirs, strict=True)
        return {name: f"{name}@{digest.hex()}" for name, digest in named if digest != self.order[name]}

    def changed(self, packed_order: bytes, allowed: Collection[str]) -> list[str]:
        """The parts that are not another stream's and may differ: each is asked for by its name and old digest.

        Raises ``ContractError`` where others differ too.
        """
        differing = self.differing(packed_order)
        refused = {name: change for name, change in differing.items() if change not in allowed}
        if not refused:
            return list(differing)
        lines = ", ".join(differing.values())
        raise ContractError(
            f"snapshot: made from another stream; these differ: {', '.join(refused)}; serve the data and settings that "
            f"the checkpoint was trained on, or allow this very change:  resume: {{allow_changes: [{lines}]}}"
        )


def _digests(parts: Mapping[str, object]) -> dict[str, bytes]:
    return {
        name: blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=PART_BYTES).digest()
        for name, part in parts.items()
    }
