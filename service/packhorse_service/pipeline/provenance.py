"""Which samples a step's rows were made of: names alone, for the day on which a row is not what it was."""

from __future__ import annotations

from collections.abc import Sequence

from packhorse_service.mixing.open_blocks import SourcePlan
from packhorse_service.packing.modes import PackedMicroBatch
from packhorse_service.text.formatting import NAMES_SHOWN, and_more

__all__ = ["Provenance"]


class Provenance:
    """Callable with (data-parallel rank, index). Keeps no block alive."""

    def __init__(
        self,
        micro_batches: Sequence[PackedMicroBatch],
        ranks: Sequence[Sequence[int]],
        sources: Sequence[SourcePlan],
    ) -> None:
        self._count = [len(each.pieces) for each in micro_batches]
        self._named = [
            [(piece.source, piece.shard, piece.block.keys, piece.sample) for piece in each.pieces[:NAMES_SHOWN]]
            for each in micro_batches
        ]
        self._ranks = ranks
        self._sources = sources

    def __call__(self, rank: int, index: int) -> str:
        """Name the shards and samples of this rank's row, for people."""
        number = min(self._ranks[rank][index], len(self._named) - 1)  # a filler is the last row again
        by_shard: dict[tuple[int, int], list[str]] = {}
        for source, shard, keys, sample in self._named[number]:
            by_shard.setdefault((source, shard), []).append(repr(keys[sample] if keys else sample))
        named = [
            f"samples {', '.join(keys)} of shard {self._sources[source].shards[shard].name!r} of source "
            f"{self._sources[source].order.name!r}"
            for (source, shard), keys in by_shard.items()
        ]
        more = [and_more(self._count[number] - NAMES_SHOWN, "samples")] if self._count[number] > NAMES_SHOWN else []
        return "; ".join(named + more)
