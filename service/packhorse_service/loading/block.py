"""The values that travel between sources, loaders and the mixer.

A *block* is a run of consecutive samples of one shard. A loader turns a ``BlockRequest`` into a
``TokenBlock``; both are plain data, so any engine can carry them between processes. A block says where
the next one begins, so a shard is always read forward from a byte offset.

Shapes: n = samples in the block, N = their ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from packhorse_service.sources.shards import Shard

__all__ = ["BlockRequest", "Fault", "TokenBlock"]


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Read ``shard`` of ``source`` from byte ``offset``, whose first sample is number ``first_sample``.

    ``offset`` counts bytes of the shard's stream: of the decompressed one where the shard is compressed.
    """

    source: str
    shard: Shard
    offset: int
    first_sample: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a sample whose content cannot be used. The sample keeps its place in the block, with no ids."""

    index: int  # within the block
    place: str  # "shard 'a.tar', member 'x.txt' at byte 512"
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlock:
    """Decoded and tokenised samples of one block. Two are equal where they are one.

    ``next_offset`` is where the following block begins, or ``None`` when the shard ends here.
    """

    tokens: npt.NDArray[np.uint32]  # [N] ids of all samples, one after the other
    offsets: npt.NDArray[np.int64]  # [n+1] sample i holds tokens[offsets[i]:offsets[i + 1]]
    loss_mask: npt.NDArray[np.uint8] | None  # [N] 1 where predicting that id is trained on; None = everywhere
    labels: npt.NDArray[np.uint32] | None  # [N] labels a source brings itself, already shifted; None = next id
    keys: tuple[str, ...]  # [n] the sample's key in its shard
    next_offset: int | None
    faults: tuple[Fault, ...] = field(default=())
    checksum: int = 0  # of all of it, to find a shard that was written anew; 0 = none

    @property
    def count(self) -> int:
        """Number of samples, faulty ones included."""
        return len(self.keys)
