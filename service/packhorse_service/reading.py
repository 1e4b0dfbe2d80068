"""The blocks that samples are being drawn from: one for each open shard of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packhorse.errors import ProtocolError, SourceError
from packhorse_service.blocks import BlockRequest, Fault, Shard, TokenBlock
from packhorse_service.cutting import OverLength
from packhorse_service.loading import BlockStore
from packhorse_service.mixing import BlockFacts, OpenShard, Order, SourcePlan
from packhorse_service.shuffling import permutation, seed_of

__all__ = ["OpenBlocks", "Reading", "SourceSetting", "check_offsets"]

COMPRESSION_LIMIT = 1100  # what deflate can reach


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetting:
    """How one source is read."""

    plan: SourcePlan
    shards: tuple[Shard, ...]
    over_length: OverLength
    skip_budget: int  # samples whose content may be unusable before the stream stops


@dataclass(slots=True)
class Reading:
    """A block being drawn from."""

    request: BlockRequest
    block: TokenBlock
    facts: BlockFacts
    ends: list[int]  # offsets of the block's samples, as plain integers
    order: list[int]  # which sample is drawn i-th
    faults: Mapping[int, Fault]
    drawn_from: bool = False


class OpenBlocks:
    """The blocks where ``head`` stands. Another block is loaded once the one before it is drawn from."""

    def __init__(self, settings: Sequence[SourceSetting], store: BlockStore, head: Order) -> None:
        self._settings = settings
        self._store = store
        self._head = head
        self._reading: dict[tuple[int, int], Reading] = {}  # (source, shard) -> block in use
        self._keys: dict[tuple[int, int], set[str]] = {}  # of the open shards, to find a key given twice
        store.forget()
        for number, source in enumerate(head.sources):
            store.announce(self._request(number, s.shard, s.offset, s.first_sample) for s in source.open)

    def at(self, source: int, at: OpenShard) -> Reading:
        """The block that an open shard stands in."""
        reading = self._reading.get((source, at.shard))
        if reading is None:
            request = self._request(source, at.shard, at.offset, at.first_sample)
            reading = self._open(source, at.shard, request, self._store.get(request))
            self._reading[source, at.shard] = reading
        return reading

    def draw_from(self, source: int, shard: int, reading: Reading) -> None:
        """The first sample is drawn from this block: it is time to load the one behind it."""
        reading.drawn_from = True
        self._store.announce(self._behind(source, shard, reading))

    def leave(self, source: int, shard: int, reading: Reading) -> None:
        """Its last sample was drawn."""
        del self._reading[source, shard]
        if reading.facts.next_offset is None:
            del self._keys[source, shard]

    def check(self) -> None:
        """Every open shard must hold what the order says of it. Raises ``SourceError``."""
        for source, order in enumerate(self._head.sources):
            for at in order.open:
                block, name = self.at(source, at).block, self._settings[source].shards[at.shard].name
                if at.index >= block.count:
                    raise SourceError(f"shard {name!r} has no sample {at.index} in the block at {at.offset}")
                if at.checksum and at.checksum != block.checksum:
                    raise SourceError(
                        f"shard {name!r} holds other samples at byte {at.offset} than it held, under the same name and "
                        "size, or a library tokenises them otherwise; put back what was there"
                    )

    def _open(self, source: int, shard: int, request: BlockRequest, block: TokenBlock) -> Reading:
        setting = self._settings[source]
        keys = self._keys.setdefault((source, shard), set())
        twice = next((key for key in block.keys if key in keys), None)
        if twice is not None:
            raise SourceError(
                f"shard {request.shard.name!r} of source {request.source!r}: duplicate key {twice!r}; "
                "a key names one sample in a shard: write the shard again with keys that differ"
            )
        keys.update(block.keys)
        order = list(range(block.count))
        if setting.plan.shuffle:
            epoch = self._head.sources[source].epoch
            seed = seed_of(setting.plan.seed, setting.plan.name, epoch, shard, request.first_sample)
            order = permutation(block.count, seed).tolist()
        facts = BlockFacts(block.count, block.next_offset, block.checksum)
        faults = {fault.index: fault for fault in block.faults}
        return Reading(request, block, facts, block.offsets.tolist(), order, faults)

    def _behind(self, source: int, shard: int, reading: Reading) -> list[BlockRequest]:
        if reading.facts.next_offset is not None:
            first = reading.request.first_sample + reading.facts.samples
            return [self._request(source, shard, reading.facts.next_offset, first)]
        upcoming = self._head.sources[source].next_shard()
        return [] if upcoming is None else [self._request(source, upcoming, 0, 0)]

    def _request(self, source: int, shard: int, offset: int, first_sample: int) -> BlockRequest:
        setting = self._settings[source]
        return BlockRequest(setting.plan.name, setting.shards[shard], offset, first_sample)


def check_offsets(settings: Sequence[SourceSetting], order: Order) -> None:
    """Raises ``ProtocolError`` where an open shard cannot have a block at its offset."""
    for setting, source in zip(settings, order.sources, strict=True):
        for at in source.open:
            shard = setting.shards[at.shard]
            # Only a compressed shard can be longer than its file.
            if at.offset > shard.size * COMPRESSION_LIMIT:
                raise ProtocolError(f"snapshot: shard {shard.name!r} has no block at byte {at.offset}")
