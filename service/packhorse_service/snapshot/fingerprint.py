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

__all__ = ["RESETS_SOURCES", "RESUMABLE_CHANGES", "StreamFingerprint"]

PART_BYTES = 8

RESETS_SOURCES = frozenset({"blocks", "order"})  # without these a place in the data has no meaning

# part of the order -> what to expect of a stream that goes on with it changed
RESUMABLE_CHANGES: dict[str, str] = {
    "blocks": "every source begins its data anew",
    "date": "samples are rendered with the new date",
    "manifest": "shards are taken by their number in the list, whatever their names, sizes and contents are",
    "mixture": "weights and epochs are the new ones, and no source catches up for what was before",
    "order": "every source begins its data anew",
    "over_length": "samples that are over length, unusable or not trained on are treated by the new policies",
    "rendering": "samples are decoded by the new format and template",
    "tokenizer": "samples have the ids of the new tokenizer",
}


@dataclass(frozen=True, slots=True)
class StreamFingerprint:
    """``sample_parts`` holds what decides the samples and their order, ``row_parts`` what decides packs and ranks."""

    sample_parts: Mapping[str, bytes]
    row_parts: Mapping[str, bytes]

    @classmethod
    def of(cls, sample_parts: Mapping[str, object], row_parts: Mapping[str, object]) -> StreamFingerprint:
        """Make one from JSON-able descriptions of each part."""
        return cls(_digests(sample_parts), _digests(row_parts))

    @property
    def digest(self) -> bytes:
        """16 bytes: equal only where every position has the same bytes."""
        parts = {**self.sample_parts, **self.row_parts}
        return blake2b(b"".join(name.encode() + parts[name] for name in sorted(parts)), digest_size=16).digest()

    def encoded_parts(self) -> bytes:
        """Return the digests of the parts that a snapshot depends on, in order of their names."""
        return b"".join(self.sample_parts[name] for name in sorted(self.sample_parts))

    def differing(self, encoded_parts: bytes) -> dict[str, str]:
        """Return the sample parts that differ from another stream's: name -> the change, as asked for."""
        theirs = (encoded_parts[i * PART_BYTES : (i + 1) * PART_BYTES] for i in range(len(self.sample_parts)))
        named = zip(sorted(self.sample_parts), theirs, strict=True)
        return {name: f"{name}@{digest.hex()}" for name, digest in named if digest != self.sample_parts[name]}

    def changed(self, encoded_parts: bytes, allowed: Collection[str]) -> list[str]:
        """Return the parts that are not another stream's and may differ: each is asked for by its name and old digest.

        Raises ``ContractError`` where others differ too.
        """
        differing = self.differing(encoded_parts)
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
