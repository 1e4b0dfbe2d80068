"""The blocks that samples are being drawn from: one for each open shard of each source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packhorse.errors import ProtocolError, SourceError
from packhorse.rounding import ceil_div
from packhorse_service.loading.block import BlockRequest, Fault, TokenBlock
from packhorse_service.loading.engine import BlockStore
from packhorse_service.mixing.order import BlockFacts, OpenShard, OrderCursor, SourceCursor, SourceOrderPlan
from packhorse_service.mixing.over_length import UNLIMITED, OverLength
from packhorse_service.mixing.permutation import permutation, seed_of
from packhorse_service.sources.shards import Shard

__all__ = [
    "OpenBlock",
    "OpenBlocks",
    "SampleRanges",
    "SourcePlan",
    "UncutRun",
    "check_offsets",
    "compressed_shard_warnings",
    "over_length_fault",
]

COMPRESSION_LIMIT = 1100  # what deflate can reach


class SampleRanges(NamedTuple):
    """Where samples are, in the order in which they are drawn."""

    samples: list[int]  # [n] number in the block
    begins: list[int]  # [n] first id
    ends: list[int]  # [n] the one behind the last
    slots: list[int]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """How one source is read."""

    order: SourceOrderPlan
    shards: tuple[Shard, ...]
    over_length: OverLength
    skip_budget: int  # samples whose content may be unusable before the stream stops


@dataclass(slots=True)
class OpenBlock:
    """A block being drawn from: where its samples are, as plain integers, in the order in which they are drawn."""

    shard: int
    request: BlockRequest
    block: TokenBlock
    facts: BlockFacts
    spans: SampleRanges
    overlap: int  # ids of a piece beyond its slots: the last target, where that is the next id of the same sample
    longest: int  # slots of the longest sample; more than any limit where some are faulty, so that each is looked at
    faults: Mapping[int, Fault]
    drawn_from: bool = False


class UncutRun(NamedTuple):
    """Samples ahead, and what gives them in turn."""

    spans: SampleRanges
    shards: list[int]
    blocks: list[TokenBlock]


class OpenBlocks:
    """One source's blocks, where its ``order`` stands. Another is loaded once the one before it is drawn from."""

    def __init__(self, setting: SourcePlan, store: BlockStore, order: SourceCursor, *, concatenated: bool) -> None:
        self.order = order
        self._setting = setting
        self._store = store
        self._concatenated = concatenated
        self.reading: dict[int, OpenBlock] = {}  # shard -> block in use, where it was opened
        self._keys: dict[int, set[str]] = {}  # of the open shards, to find a key given twice
        store.announce(self._request(at.shard, at.offset, at.first_sample) for at in order.open)

    def next_ids(self) -> int:
        """Ids of the source's next sample."""
        at = self.order.current
        reading = self.reading.get(at.shard) or self.open(at)
        return reading.spans.ends[at.index] - reading.spans.begins[at.index]

    def plain(self, slots: int) -> int:
        """How many samples can be drawn with nothing to do but to count them.

        That is with every open shard in turn, up to where a block ends; none where one has yet to be drawn from,
        or may hold a sample that is faulty or of more than ``slots`` slots.
        """
        order, most = self.order, UNLIMITED
        for turn, at in enumerate(order.in_turn()):
            reading = self.reading.get(at.shard)
            if reading is None or not reading.drawn_from or reading.longest > slots:
                return 0
            most = min(most, turn + len(order.open) * (reading.facts.samples - 1 - at.index))
        return most

    def ahead(self, draws: int) -> UncutRun:
        """So many samples of those that ``plain`` told of."""
        shards = self.order.in_turn()
        rounds = ceil_div(draws, len(shards))
        readings = [self.reading[at.shard] for at in shards]
        each = [
            [column[at.index : at.index + rounds] for column in reading.spans]
            for reading, at in zip(readings, shards, strict=True)
        ]
        spans = SampleRanges(*[_in_turn(columns)[:draws] for columns in zip(*each, strict=True)])
        return UncutRun(spans, [reading.shard for reading in readings], [reading.block for reading in readings])

    def draw_from(self, shard: int, reading: OpenBlock) -> None:
        """The first sample is drawn from this block: it is time to load the one behind it."""
        reading.drawn_from = True
        self._store.announce(self._behind(shard, reading))

    def leave(self, shard: int, reading: OpenBlock) -> None:
        """Its last sample was drawn."""
        del self.reading[shard]
        if reading.facts.next_offset is None:
            del self._keys[shard]

    def check(self) -> None:
        """Every open shard must hold what the order says of it. Raises ``SourceError``."""
        for at in self.order.open:
            block, name = self.open(at).block, self._setting.shards[at.shard].name
            if at.index >= block.count:
                raise SourceError(f"shard {name!r} has no sample {at.index} in the block at {at.offset}")
            if at.checksum and at.checksum != block.checksum:
                raise SourceError(
                    f"shard {name!r} holds other samples at byte {at.offset} than it held, under the same name and "
                    "size, or a library tokenises them otherwise; put back what was there"
                )

    def open(self, at: OpenShard) -> OpenBlock:
        """Take the block that an open shard stands in, waiting for it if need be."""
        setting, shard = self._setting, at.shard
        request = self._request(shard, at.offset, at.first_sample)
        block = self._store.get(request)
        keys = self._keys.setdefault(shard, set())
        if not keys.isdisjoint(block.keys):
            twice = next(key for key in block.keys if key in keys)
            raise SourceError(
                f"shard {request.shard.name!r} of source {request.source!r}: duplicate key {twice!r}; "
                "a key names one sample in a shard: write the shard again with keys that differ"
            )
        keys.update(block.keys)
        samples = np.arange(block.count)
        if setting.order.shuffle:
            seed = seed_of(setting.order.seed, setting.order.name, self.order.epoch, shard, request.first_sample)
            samples = permutation(block.count, seed)
        begins, ends = block.offsets[samples], block.offsets[samples + 1]
        overlap = 1 if block.labels is None and not self._concatenated else 0
        slots = ends - begins - overlap
        reading = self.reading[shard] = OpenBlock(
            shard=shard,
            request=request,
            block=block,
            facts=BlockFacts(block.count, block.next_offset, block.checksum),
            spans=SampleRanges(samples.tolist(), begins.tolist(), ends.tolist(), slots.tolist()),
            overlap=overlap,
            longest=UNLIMITED + 1 if block.faults else int(slots.max(initial=0)),
            faults={fault.index: fault for fault in block.faults},
        )
        return reading

    def _behind(self, shard: int, reading: OpenBlock) -> list[BlockRequest]:
        if reading.facts.next_offset is not None:
            first = reading.request.first_sample + reading.facts.samples
            return [self._request(shard, reading.facts.next_offset, first)]
        upcoming = self.order.next_shard()
        return [] if upcoming is None else [self._request(upcoming, 0, 0)]

    def _request(self, shard: int, offset: int, first_sample: int) -> BlockRequest:
        return BlockRequest(self._setting.order.name, self._setting.shards[shard], offset, first_sample)


def _in_turn(columns: Sequence[list[int]]) -> list[int]:
    """The first of each column, then the second of each, and so on: they are equally long."""
    woven = [0] * (len(columns) * len(columns[0]))
    for turn, column in enumerate(columns):
        woven[turn :: len(columns)] = column
    return woven


def check_offsets(settings: Sequence[SourcePlan], order: OrderCursor) -> None:
    """Raises ``ProtocolError`` where an open shard cannot have a block at its offset."""
    for setting, source in zip(settings, order.sources, strict=True):
        for at in source.open:
            shard = setting.shards[at.shard]
            # Only a compressed shard can be longer than its file.
            if at.offset > shard.size * COMPRESSION_LIMIT:
                raise ProtocolError(f"snapshot: shard {shard.name!r} has no block at byte {at.offset}")


def compressed_shard_warnings(settings: tuple[SourcePlan, ...]) -> Iterator[str]:
    """What should be said of shards that can only be read from their start. Their names tell, not a look inside."""
    for setting in settings:
        compressed = [shard.name for shard in setting.shards if shard.name.endswith((".gz", ".tgz"))]
        if compressed:
            yield (
                f"source {setting.order.name!r}: {len(compressed)} shards ({compressed[0]!r} …) are compressed whole: "
                "each block reads them from their start again; decompress them, or compress their members instead"
            )


def over_length_fault(sample: int, shard: Shard, block: TokenBlock, slots: int, limit: int) -> Fault:
    """Of a sample that is too long, where the policy is not to have any."""
    return Fault(
        sample,
        f"shard {shard.name!r}, sample {block.keys[sample]!r}",
        f"{slots} slots are more than seq_length={limit}; set over_length to split, truncate_right, truncate_left or "
        "drop, or raise seq_length",
    )
