"""The snapshots of a stream that one reader holds, so that any server can make the stream again from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from packhorse.errors import ProtocolError
from packhorse.wire.digest import digest_of
from packhorse.wire.messages import SnapshotRef

__all__ = ["HeldSnapshots"]


class HeldSnapshots(Mapping[int, bytes]):
    """Snapshots by the step that each stands before, in the order of their steps."""

    def __init__(self, held: Mapping[int, bytes] | None = None) -> None:
        self._held = dict(held or {})

    def __getitem__(self, step: int) -> bytes:
        return self._held[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, step: int, snapshot: bytes | bytearray | memoryview) -> None:
        """Keep a copy of a snapshot that arrived, as steps go: the frame's memory goes with the frame."""
        self._held[step] = bytes(snapshot)

    def release(self, needed: int) -> None:
        """Keep the last snapshot at or before step ``needed``, and all after it."""
        while len(self._held) > 1:  # they came in the order of their steps
            oldest, next_one = islice(self._held, 2)
            if next_one > needed:
                break
            del self._held[oldest]

    def refs(self) -> tuple[SnapshotRef, ...]:
        """Return step and digest of each, as HELLO says them."""
        return tuple(SnapshotRef(step, digest_of(snapshot)) for step, snapshot in sorted(self._held.items()))

    def named(self, step: int, digest: bytes) -> bytes:
        """Return the snapshot before ``step`` with this digest. Raises ``ProtocolError`` where it is not held."""
        snapshot = self._held.get(step)
        if snapshot is None or digest_of(snapshot) != digest:
            raise ProtocolError(f"the server asked for a snapshot before step {step} that is not held here")
        return snapshot
