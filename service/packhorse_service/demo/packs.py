"""The first packs as the ranks got them: each rank saves its slices, the demo puts the rows together again.

Shapes: T = row width in slots, t = T / CP local slots, S = segments.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse import Coordinates, MicroBatch

__all__ = ["Pack", "Place", "load_packs", "save_slice"]

SLOT_ARRAYS = ("tokens", "loss_mask")  # [t] each
OFFSET_ARRAYS = ("cu_seqlens", "cu_seqlens_padded")  # [S+1] each


class Place(NamedTuple):
    """Place of a pack: the ``index``-th micro-batch of data-parallel rank ``data`` in ``step``."""

    step: int
    data: int
    index: int  # type: ignore[assignment]  # tuple.index is shadowed on purpose

    def __str__(self) -> str:
        return f"step {self.step}, data rank {self.data}, micro-batch {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Pack as its ranks got it, put together to one whole row."""

    place: Place
    tokens: npt.NDArray[np.int64]  # [T]
    loss_mask: npt.NDArray[np.float32]  # [T]
    holder: npt.NDArray[np.int64]  # [T] the context-parallel rank that holds the slot
    cu_seqlens: npt.NDArray[np.int32]  # [S+1] logical
    cu_seqlens_padded: npt.NDArray[np.int32]  # [S+1] physical
    sources: list[str]  # of each segment that holds a sample

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(first slot, end of the real slots, end with padding) of each segment."""
        starts, ends = self.cu_seqlens_padded[:-1], self.cu_seqlens_padded[1:]
        lengths = np.diff(self.cu_seqlens)
        return [(int(a), int(a + n), int(b)) for a, n, b in zip(starts, lengths, ends, strict=True)]


def save_slice(folder: Path, coordinates: Coordinates, micro_batch: MicroBatch) -> None:
    """Save what one rank holds of a pack."""
    place = Place(micro_batch.step, coordinates.data, micro_batch.index)
    arrays = {name: getattr(micro_batch, name).numpy() for name in (*SLOT_ARRAYS, *OFFSET_ARRAYS)}
    np.savez(
        folder / "slice-{}-{}-{}-{}.npz".format(*place, coordinates.context),
        place=np.array(place),
        context=coordinates.context,
        slots=micro_batch.slots(),
        sources=np.array([source for source, _shard, _key in micro_batch.keys], dtype=str),
        **arrays,
    )


def load_packs(folder: Path) -> list[Pack]:
    """Return the packs of which slices lie in ``folder``, in order."""
    slices: defaultdict[Place, list[dict[str, Any]]] = defaultdict(list)
    for path in folder.glob("slice-*.npz"):
        with np.load(path) as saved:
            slices[Place(*saved["place"].tolist())].append(dict(saved))
    return [_join(place, slices[place]) for place in sorted(slices)]


def _join(place: Place, slices: list[dict[str, Any]]) -> Pack:
    """Put one row together from the slices of its context-parallel ranks."""
    width = int(slices[0]["cu_seqlens_padded"][-1])
    row = {name: np.zeros(width, slices[0][name].dtype) for name in SLOT_ARRAYS}
    holder = np.zeros(width, np.int64)
    for part in slices:
        holder[part["slots"]] = part["context"]
        for name in SLOT_ARRAYS:
            row[name][part["slots"]] = part[name]
    offsets = {name: slices[0][name] for name in OFFSET_ARRAYS}
    return Pack(place=place, holder=holder, sources=slices[0]["sources"].tolist(), **row, **offsets)
