"""The order of samples: which source gives the next one, and where in it that sample is.

Everything here is integers, so the order can be copied, saved and replayed exactly. It is a pure
function of the plan and of how many ids each drawn sample has; padding and the layout never enter.

Within a source: each epoch permutes the shards; ``open_shards`` of them are open at once and give one
sample each in turn; a shard that ends is replaced in its place by the next one of the permutation.
Between sources: the next sample comes from the live source that is furthest below its weight in ids.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Self

from packhorse.errors import ProtocolError
from packhorse_service.shuffling import permutation, seed_of

__all__ = ["BlockFacts", "OpenShard", "Order", "SourceOrder", "SourcePlan", "integer_weights"]

SOURCE_FORMAT = struct.Struct("<IIHHQQ")  # epoch, opened, turn, open shards, ids drawn, faults
SHARD_FORMAT = struct.Struct("<IQQI")  # shard, block offset, first sample, index in the block


class BlockFacts(NamedTuple):
    """What the order needs to know of a block: its samples, and where the next one begins."""

    samples: int
    next_offset: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What never changes about a source's order. ``epochs`` is ``None`` where it repeats for ever."""

    name: str
    shards: int
    weight: int  # positive; relative to the other sources'
    epochs: int | None
    open_shards: int
    shuffle: bool
    seed: int


@dataclass(slots=True)
class OpenShard:
    """A shard being read: the block it is in, and the next sample within that block."""

    shard: int
    offset: int = 0
    first_sample: int = 0
    index: int = 0


@lru_cache(maxsize=256)
def _shard_order(plan: SourcePlan, epoch: int) -> tuple[int, ...]:
    if not plan.shuffle:
        return tuple(range(plan.shards))
    return tuple(permutation(plan.shards, seed_of(plan.seed, plan.name, epoch)).tolist())


@dataclass(slots=True)
class SourceOrder:
    """Where one source stands. ``advance`` is the only way it moves."""

    plan: SourcePlan
    epoch: int = 0
    opened: int = 0  # shards of this epoch's permutation that were opened so far
    turn: int = 0  # which open shard gives the next sample
    open: list[OpenShard] = field(default_factory=list)
    drawn_ids: int = 0
    faults: int = 0

    @classmethod
    def at_start(cls, plan: SourcePlan) -> Self:
        order = cls(plan)
        order._open_first()
        return order

    @property
    def live(self) -> bool:
        return bool(self.open)

    @property
    def current(self) -> OpenShard:
        """The shard that gives the next sample."""
        return self.open[self.turn]

    def next_shard(self) -> int | None:
        """The shard that will be opened next, if any: worth loading ahead."""
        if self.opened < self.plan.shards:
            return _shard_order(self.plan, self.epoch)[self.opened]
        return _shard_order(self.plan, self.epoch + 1)[0] if self._repeats() else None

    def advance(self, ids: int, facts: BlockFacts, *, faulty: bool) -> None:
        """The current sample was drawn: move to the next."""
        self.drawn_ids += ids
        self.faults += faulty
        shard = self.open[self.turn]
        shard.index += 1
        if shard.index < facts.samples:
            self.turn = (self.turn + 1) % len(self.open)
        elif facts.next_offset is not None:
            shard.offset, shard.first_sample, shard.index = facts.next_offset, shard.first_sample + facts.samples, 0
            self.turn = (self.turn + 1) % len(self.open)
        else:
            self._close_current()

    def _close_current(self) -> None:
        if self.opened < self.plan.shards:
            self.open[self.turn] = OpenShard(_shard_order(self.plan, self.epoch)[self.opened])
            self.opened += 1
            self.turn = (self.turn + 1) % len(self.open)
            return
        del self.open[self.turn]
        if self.open:
            self.turn %= len(self.open)
        elif self._repeats():
            self.epoch += 1
            self._open_first()

    def _repeats(self) -> bool:
        return self.plan.epochs is None or self.epoch + 1 < self.plan.epochs

    def _open_first(self) -> None:
        first = _shard_order(self.plan, self.epoch)[: self.plan.open_shards]
        self.open = [OpenShard(shard) for shard in first]
        self.opened, self.turn = len(first), 0

    def clone(self) -> SourceOrder:
        return replace(self, open=[copy(shard) for shard in self.open])

    def encode(self) -> bytes:
        head = SOURCE_FORMAT.pack(self.epoch, self.opened, self.turn, len(self.open), self.drawn_ids, self.faults)
        return head + b"".join(SHARD_FORMAT.pack(s.shard, s.offset, s.first_sample, s.index) for s in self.open)

    @classmethod
    def decode(cls, plan: SourcePlan, data: memoryview) -> tuple[Self, memoryview]:
        """Read one source's place, which may come from a stranger. Returns the rest of the data too."""
        try:
            epoch, opened, turn, count, drawn, faults = SOURCE_FORMAT.unpack_from(data)
            end = SOURCE_FORMAT.size + count * SHARD_FORMAT.size
            shards = [OpenShard(*parts) for parts in SHARD_FORMAT.iter_unpack(data[SOURCE_FORMAT.size : end])]
        except struct.error as error:
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is cut short") from error
        order = cls(plan, epoch, opened, turn, shards, drawn, faults)
        if len(shards) != count or not order._is_possible():
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is outside its shards and epochs")
        return order, data[end:]

    def _is_possible(self) -> bool:
        """Whether drawing could have led here."""
        at_once = min(self.plan.open_shards, self.plan.shards)
        if not at_once <= self.opened <= self.plan.shards or not self._in_epochs():
            return False
        been_opened = set(_shard_order(self.plan, self.epoch)[: self.opened])
        distinct = {shard.shard for shard in self.open}
        all_opened = self.opened == self.plan.shards
        return (
            len(distinct) == len(self.open) <= at_once
            and distinct <= been_opened
            and (len(self.open) == at_once or all_opened)
            and (bool(self.open) or not self._repeats())
            and self.turn < max(len(self.open), 1)
            and all((shard.offset == 0) == (shard.first_sample == 0) for shard in self.open)
        )

    def _in_epochs(self) -> bool:
        return self.plan.epochs is None or self.epoch < self.plan.epochs


def integer_weights(weights: Iterable[float]) -> list[int]:
    """Integers in the ratio of ``weights``, which are read as decimals: 0.1 is a tenth."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in fractions))
    return [int(f * scale) for f in fractions]


class Order:
    """The order of the whole mixture: one place a source, compared in integers."""

    def __init__(self, sources: list[SourceOrder]) -> None:
        self.sources = sources
        common = math.lcm(*(source.plan.weight for source in sources))
        self._scale = [common // source.plan.weight for source in sources]

    def choose(self) -> int | None:
        """Number of the source that gives the next sample; ``None`` at the end of all of them."""
        live = [number for number, source in enumerate(self.sources) if source.live]
        return min(live, key=lambda number: self.sources[number].drawn_ids * self._scale[number], default=None)

    def clone(self) -> Order:
        return Order([source.clone() for source in self.sources])

    def encode(self) -> bytes:
        return b"".join(source.encode() for source in self.sources)
