"""The blocks that samples are being drawn from: one for each open shard of each source.

``OpenBlocks`` loads the block behind each open one ahead of its turn, and puts the samples of a block into the order
in which they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packhorse.errors import ConfigError, ProtocolError, SourceError
from packhorse.rounding import ceil_div
from packhorse_service.loading.block import BlockRequest, Fault, TokenBlock
from packhorse_service.loading.engine import BlockStore
from packhorse_service.mixing.order import BlockFacts, OpenShard, OrderCursor, SourceCursor, SourceOrderPlan
from packhorse_service.mixing.over_length import UNLIMITED, OverLength
from packhorse_service.mixing.permutation import permutation, seed_of
from packhorse_service.mixing.unsupervised import Unsupervised, has_untrained_sample
from packhorse_service.sources.shards import Shard

__all__ = [
    "OpenBlock",
    "OpenBlocks",
    "SampleRanges",
    "SourcePlan",
    "UncutRun",
    "check_offsets",
    "compressed_shard_warnings",
]

COMPRESSION_LIMIT = 1100  # what deflate can reach


class SampleRanges(NamedTuple):
    """Ranges of ids of n samples, as columns in the order in which the samples are drawn."""

    samples: list[int]  # [n] number in the block
    begins: list[int]  # [n] first id
    ends: list[int]  # [n] the one behind the last
    slots: list[int]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """Plan of one source: its order, its shards, and what becomes of samples that cannot be used as they are.

    Raises ``ConfigError`` where its parts do not fit.
    """

    order: SourceOrderPlan
    shards: tuple[Shard, ...]
    over_length: OverLength
    skip_budget: int  # samples whose content may be unusable before the stream stops
    unsupervised: Unsupervised = Unsupervised.KEEP

    def __post_init__(self) -> None:
        name = self.order.name
        if len(self.shards) != self.order.shards:
            raise ConfigError(f"source {name!r}: {len(self.shards)} shards, and an order of {self.order.shards}")
        if self.skip_budget < 0:
            raise ConfigError(f"source {name!r}: skip_budget={self.skip_budget} must be at least 0")


@dataclass(slots=True)
class OpenBlock:
    """A block being drawn from, with its samples' ranges as plain integers in the order in which they are drawn.

    Lists, as an element of a list is had 40 ns sooner than one of an array (measured), several times a sample.
    """

    shard: int
    request: BlockRequest
    block: TokenBlock
    facts: BlockFacts
    ranges: SampleRanges
    overlap: int  # ids of a piece beyond its slots: the last target, where that is the next id of the same sample
    longest: int  # slots of the longest sample; more than any limit where each is to be looked at for another reason
    faults: Mapping[int, Fault]
    drawn_from: bool = False


class UncutRun(NamedTuple):
    """Samples ahead that need no look, and the shards and blocks that give them in turn."""

    ranges: SampleRanges
    shards: list[int]
    blocks: list[TokenBlock]


class OpenBlocks:
    """Blocks in use of one source, where ``order`` stands. The one behind is loaded once a block is drawn from."""

    def __init__(self, plan: SourcePlan, store: BlockStore, order: SourceCursor, *, concatenated: bool) -> None:
        self.order = order
        self._plan = plan
        self._store = store
        self._concatenated = concatenated
        self.in_use: dict[int, OpenBlock] = {}  # by shard, from when it was opened on
        self._keys: dict[int, set[str]] = {}  # of the open shards, to find a key given twice
        store.prefetch(self._request(at.shard, at.offset, at.first_sample) for at in order.open)

    def next_ids(self) -> int:
        """Return how many ids the source's next sample has."""
        at = self.order.current
        block = self.in_use.get(at.shard) or self.open(at)
        return block.ranges.ends[at.index] - block.ranges.begins[at.index]

    def uncut_run_length(self, slots: int) -> int:
        """Return how many samples can be drawn with nothing to do but to count them.

        That is with every open shard in turn, up to where a block ends; none where one has yet to be drawn from,
        or may hold a sample that is faulty or of more than ``slots`` slots.
        """
        order, most = self.order, UNLIMITED
        for turn, at in enumerate(order.open_in_turn()):
            block = self.in_use.get(at.shard)
            if block is None or not block.drawn_from or block.longest > slots:
                return 0
            most = min(most, turn + len(order.open) * (block.facts.samples - 1 - at.index))
        return most

    def uncut_run(self, draws: int) -> UncutRun:
        """Return the next ``draws`` samples, at most ``uncut_run_length``."""
        shards = self.order.open_in_turn()
        rounds = ceil_div(draws, len(shards))
        blocks = [self.in_use[at.shard] for at in shards]
        each = [
            [column[at.index : at.index + rounds] for column in block.ranges]
            for block, at in zip(blocks, shards, strict=True)
        ]
        ranges = SampleRanges(*[_in_turn(columns)[:draws] for columns in zip(*each, strict=True)])
        return UncutRun(ranges, [block.shard for block in blocks], [block.block for block in blocks])

    def begin(self, shard: int, block: OpenBlock) -> None:
        """Note that a block's first sample is drawn: it is time to load the one behind it."""
        block.drawn_from = True
        self._store.prefetch(self._behind(shard, block))

    def close(self, shard: int, block: OpenBlock) -> None:
        """Let go of a block whose last sample was drawn."""
        del self.in_use[shard]
        if block.facts.next_offset is None:
            del self._keys[shard]

    def check(self) -> None:
        """Open the block of every open shard. Raises ``SourceError`` where it is not what the order says of it."""
        for at in self.order.open:
            block, name = self.open(at).block, self._plan.shards[at.shard].name
            if at.index >= block.count:
                raise SourceError(f"shard {name!r} has no sample {at.index} in the block at {at.offset}")
            if at.checksum and at.checksum != block.checksum:
                raise SourceError(
                    f"shard {name!r} holds other samples at byte {at.offset} than it held, under the same name and "
                    "size, or a library tokenises them otherwise; put back what was there"
                )

    def open(self, at: OpenShard) -> OpenBlock:
        """Take the block that an open shard stands in, waiting for it if need be.

        Raises ``SourceError`` as its loader did, and for a key that an earlier block of the shard has too.
        """
        plan, shard = self._plan.order, at.shard
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
        if plan.shuffle:
            seed = seed_of(plan.seed, plan.name, self.order.epoch, shard, request.first_sample)
            samples = permutation(block.count, seed)
        begins, ends = block.offsets[samples], block.offsets[samples + 1]
        overlap = 1 if block.labels is None and not self._concatenated else 0
        slots = ends - begins - overlap
        look = block.faults or (
            self._plan.unsupervised is not Unsupervised.KEEP and has_untrained_sample(block, overlap)
        )
        opened = self.in_use[shard] = OpenBlock(
            shard=shard,
            request=request,
            block=block,
            facts=BlockFacts(block.count, block.next_offset, block.checksum),
            ranges=SampleRanges(samples.tolist(), begins.tolist(), ends.tolist(), slots.tolist()),
            overlap=overlap,
            longest=UNLIMITED + 1 if look else int(slots.max(initial=0)),
            faults={fault.index: fault for fault in block.faults},
        )
        return opened

    def _behind(self, shard: int, block: OpenBlock) -> list[BlockRequest]:
        """Return the request of the block that is needed once this one is drawn, if there is one."""
        if block.facts.next_offset is not None:
            first = block.request.first_sample + block.facts.samples
            return [self._request(shard, block.facts.next_offset, first)]
        upcoming = self.order.upcoming_shard()
        return [] if upcoming is None else [self._request(upcoming, 0, 0)]

    def _request(self, shard: int, offset: int, first_sample: int) -> BlockRequest:
        return BlockRequest(self._plan.order.name, self._plan.shards[shard], offset, first_sample)


def _in_turn(columns: Sequence[list[int]]) -> list[int]:
    """Return the first of each column, then the second of each, and so on: they are equally long."""
    woven = [0] * (len(columns) * len(columns[0]))
    for turn, column in enumerate(columns):
        woven[turn :: len(columns)] = column
    return woven


def check_offsets(plans: Sequence[SourcePlan], order: OrderCursor) -> None:
    """Raise ``ProtocolError`` where an open shard cannot have a block at its offset."""
    for plan, source in zip(plans, order.sources, strict=True):
        for at in source.open:
            shard = plan.shards[at.shard]
            # Only a compressed shard can be longer than its file.
            if at.offset > shard.size * COMPRESSION_LIMIT:
                raise ProtocolError(f"snapshot: shard {shard.name!r} has no block at byte {at.offset}")


def compressed_shard_warnings(plans: tuple[SourcePlan, ...]) -> Iterator[str]:
    """Yield a warning for each source of shards that can only be read from their start, as their names tell."""
    for plan in plans:
        compressed = [shard.name for shard in plan.shards if shard.name.endswith((".gz", ".tgz"))]
        if compressed:
            yield (
                f"source {plan.order.name!r}: {len(compressed)} shards ({compressed[0]!r} …) are compressed whole: "
                "each block reads them from their start again; decompress them, or compress their members instead"
            )
