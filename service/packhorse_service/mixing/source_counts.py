"""What became of all that each source gave: for every target drawn, one line of the account.

    targets = packed + lost to the over-length policy + unsupervised + left over at the end + pending

It holds at any moment, for each source. A target is an (input, label) pair: a slot of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packhorse_service.loading.block import BlockRequest

__all__ = ["PipelineProgress", "SourceCounts", "describe_counts"]


@dataclass(slots=True)
class SourceCounts:
    """Account of what one source gave since the place that the stream began at or was last restored to.

    What is drawn again from there counts as it stands: packed, or pending. ``ids`` are those stored; the rest
    are samples, or targets, as their names say; ``packed`` counts targets.
    """

    samples: int = 0  # drawn, with the lost and the faulty ones
    ids: int = 0  # as stored
    targets: int = 0
    packed: int = 0  # targets in micro-batches, those of steps made ahead included
    over_length: int = 0  # samples
    dropped_samples: int = 0  # dropped as a whole for their length
    lost_targets: int = 0  # dropped or cut off for their length
    unsupervised_pieces: int = 0  # dropped, as nothing in them is trained on
    unsupervised_targets: int = 0  # of those, and of samples skipped for such a piece
    dropped_remainder: int = 0  # targets of an incomplete last step that was dropped
    faults: int = 0  # samples skipped

    @property
    def pending(self) -> int:
        """Number of targets that wait to be packed."""
        gone = self.lost_targets + self.unsupervised_targets + self.dropped_remainder
        return self.targets - self.packed - gone


class PipelineProgress(NamedTuple):
    """Progress of a pipeline that runs, for those who watch."""

    counts: Mapping[str, SourceCounts]
    epochs: Sequence[tuple[int, int]]  # of each source: the epoch, and how many of its shards were opened
    loading: int  # blocks under way
    waiting_for: BlockRequest | None  # the block without which nothing goes on


def describe_counts(counts: Mapping[str, SourceCounts]) -> Iterator[str]:
    """Yield a line for each source: what became of its samples and targets."""
    for name, of_source in counts.items():
        yield (
            f"source {name!r}: {of_source.samples} samples of {of_source.ids} ids; of {of_source.targets} targets "
            f"{of_source.packed} packed, {of_source.lost_targets} lost, {of_source.unsupervised_targets} unsupervised, "
            f"{of_source.dropped_remainder} left over, {of_source.pending} pending; {of_source.over_length} samples "
            f"over length, {of_source.dropped_samples} lost, {of_source.unsupervised_pieces} pieces unsupervised, "
            f"{of_source.faults} skipped"
        )
