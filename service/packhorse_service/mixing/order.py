"""The order of samples: which source gives the next one, and where in it that sample is.

Everything here is integers, so the order can be copied, saved and replayed exactly. It is a pure
function of the plan and of how many ids each drawn sample has; padding and the layout never enter.

Within a source: each epoch permutes the shards; ``open_shards`` of them are open at once and give one
sample each in turn; a shard that ends is replaced in its place by the next one of the permutation.

Between sources, sizes are ids or samples (``MixBy``). Imagine a fluid that takes from every source i at its
share s of all that is drawn: it takes a sample of size l that follows d sizes of its source while the total
grows from d/s, its *virtual start*, to (d+l)/s, its *virtual finish*; the total is the *virtual time*. The
next sample is the one of earliest virtual finish among those whose virtual start is not ahead of the virtual
time, ties by number (WF²Q, Bennett and Zhang 1996). There is always one, as the starts' mean by share is the
total.

*Bound.* After every draw each source is within one sample L, the longest, of its share of what was drawn.

* Above: when drawn, d <= s·total. So afterwards the source leads by at most l - s·l <= L.
* A sample ends at most L behind its finish f. Let T be the total when last a sample of a later finish was
  drawn. All drawn since then and up to ours finish by f in the fluid, and start there after T: else one of
  them had been chosen at T. The fluid takes them between T and f, so they amount to f - T at most, and ours
  ends by T + L + (f - T) at the latest; without such a T, by f itself.
* Below: a source lags most just before it is drawn (or would be), at a total t. As t + l <= f + L, it lags
  by s·t - d <= s·(f + L - l) - d = l + s·(L - l) <= L.

When a source ends, the shares of the others are reset: what they led or lagged by is forgotten, so
nobody catches up in a burst, and the bound holds from there on for the shares of those that are left.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Self

from packhorse.errors import ConfigError, ProtocolError
from packhorse_service.mixing.permutation import permutation, seed_of

__all__ = [
    "BlockFacts",
    "DeferredCursor",
    "MixBy",
    "Mixing",
    "OnEnd",
    "OpenShard",
    "OrderCursor",
    "SourceCursor",
    "SourceOrderPlan",
    "integer_weights",
]

SOURCE_FORMAT = struct.Struct("<IIHHQQ")  # epoch, opened, next open, open shards, drawn, faults
SHARD_FORMAT = struct.Struct("<IQQII")  # shard, block offset, first sample, index in the block, its checksum
COUNT_LIMIT, SUM_LIMIT = 1 << 31, 1 << 62  # a snapshot that holds more was made up: counting on would not fit one


class MixBy(StrEnum):
    """Unit in which the sources' shares are counted."""

    TOKENS = "tokens"  # ids of its samples, as stored
    SAMPLES = "samples"


class OnEnd(StrEnum):
    """Policy for the moment when one of several sources has given all its epochs."""

    GO_ON = "go_on"  # with the rest, at their weights
    STOP = "stop"  # the stream ends


@dataclass(frozen=True, slots=True)
class Mixing:
    """Rule by which sources are mixed."""

    by: MixBy = MixBy.TOKENS
    on_end: OnEnd = OnEnd.GO_ON


class BlockFacts(NamedTuple):
    """Facts of a block that decide the order: how many samples it has, and where the next block begins."""

    samples: int
    next_offset: int | None
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrderPlan:
    """Plan of one source's order: all of it that never changes. ``epochs`` is ``None`` where it repeats for ever.

    Its fields are part of the stream's fingerprint by name. Raises ``ConfigError`` for numbers that give no order.
    """

    name: str
    shards: int
    weight: int  # positive; relative to the other sources'
    epochs: int | None
    open_shards: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        counts = {"shards": self.shards, "weight": self.weight, "open_shards": self.open_shards, "epochs": self.epochs}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"source {self.name!r}: {name}={count} must be at least 1")

    @property
    def open_at_once(self) -> int:
        """Shards that are open at the beginning of an epoch."""
        return min(self.open_shards, self.shards)

    def has_epoch(self, epoch: int) -> bool:
        """Return whether the source is read in ``epoch``, the first being 0."""
        return self.epochs is None or epoch < self.epochs

    def shard_order(self, epoch: int) -> tuple[int, ...]:
        """Return the order in which ``epoch`` opens the shards: a permutation of their numbers."""
        return _shard_order(self, epoch)


@lru_cache(maxsize=256)
def _shard_order(plan: SourceOrderPlan, epoch: int) -> tuple[int, ...]:
    if not plan.shuffle:
        return tuple(range(plan.shards))
    return tuple(permutation(plan.shards, seed_of(plan.seed, plan.name, epoch)).tolist())


@dataclass(slots=True)
class OpenShard:
    """A shard being read: the block it is in, and the next sample within that block."""

    shard: int
    offset: int = 0
    first_sample: int = 0
    index: int = 0
    checksum: int = 0  # of the block, where samples of it were drawn; 0 = not known


@dataclass(slots=True)
class SourceCursor:
    """Cursor in one source's order. ``advance``, and ``advance_by``, are the only ways it moves."""

    plan: SourceOrderPlan
    epoch: int = 0
    opened: int = 0  # shards of this epoch's permutation that were opened so far
    next_open: int = 0  # which of the open shards gives the next sample
    open: list[OpenShard] = field(default_factory=list)
    drawn: int = 0  # ids or samples, since a source last ended
    faults: int = 0

    @classmethod
    def at_start(cls, plan: SourceOrderPlan) -> Self:
        """Return the cursor before the first sample."""
        cursor = cls(plan)
        cursor._open_first()
        return cursor

    @property
    def live(self) -> bool:
        """True until all epochs are given."""
        return bool(self.open)

    @property
    def current(self) -> OpenShard:
        """Open shard that gives the next sample."""
        return self.open[self.next_open]

    def open_in_turn(self) -> list[OpenShard]:
        """Return the open shards in the order in which they give samples, from the current one on."""
        return self.open[self.next_open :] + self.open[: self.next_open]

    def upcoming_shard(self) -> int | None:
        """Return the shard that will be opened next, if any: it is worth loading ahead."""
        if self.opened < self.plan.shards:
            return self.plan.shard_order(self.epoch)[self.opened]
        return self.plan.shard_order(self.epoch + 1)[0] if self.plan.has_epoch(self.epoch + 1) else None

    def advance(self, facts: BlockFacts) -> None:
        """Move behind the next sample, which is drawn from a block of these facts."""
        shard = self.open[self.next_open]
        shard.index += 1
        shard.checksum = facts.checksum
        if shard.index < facts.samples:
            self.next_open = (self.next_open + 1) % len(self.open)
        elif facts.next_offset is not None:
            shard.offset, shard.first_sample = facts.next_offset, shard.first_sample + facts.samples
            shard.index = shard.checksum = 0
            self.next_open = (self.next_open + 1) % len(self.open)
        else:
            self._close_current()

    def advance_by(self, draws: int) -> None:
        """Move behind the next ``draws`` samples, none of them the first or the last of its block."""
        rounds, more = divmod(draws, len(self.open))
        for turn, shard in enumerate(self.open_in_turn()):
            shard.index += rounds + (turn < more)
        self.next_open = (self.next_open + draws) % len(self.open)

    def _close_current(self) -> None:
        if self.opened < self.plan.shards:
            self.open[self.next_open] = OpenShard(self.plan.shard_order(self.epoch)[self.opened])
            self.opened += 1
            self.next_open = (self.next_open + 1) % len(self.open)
            return
        del self.open[self.next_open]
        if self.open:
            self.next_open %= len(self.open)
        elif self.plan.has_epoch(self.epoch + 1):
            self.epoch += 1
            self._open_first()

    def _open_first(self) -> None:
        first = self.plan.shard_order(self.epoch)[: self.plan.open_shards]
        self.open = [OpenShard(shard) for shard in first]
        self.opened, self.next_open = len(first), 0

    def clone(self) -> SourceCursor:
        """Return a cursor at the same place that moves on its own."""
        shards = [OpenShard(s.shard, s.offset, s.first_sample, s.index, s.checksum) for s in self.open]
        return SourceCursor(self.plan, self.epoch, self.opened, self.next_open, shards, self.drawn, self.faults)

    def encode(self) -> bytes:
        """Return the cursor as bytes, for a snapshot: ``SOURCE_FORMAT``, and ``SHARD_FORMAT`` for each open shard."""
        head = SOURCE_FORMAT.pack(self.epoch, self.opened, self.next_open, len(self.open), self.drawn, self.faults)
        pack = SHARD_FORMAT.pack
        return head + b"".join([pack(s.shard, s.offset, s.first_sample, s.index, s.checksum) for s in self.open])

    @classmethod
    def decode(
        cls, plan: SourceOrderPlan, data: memoryview, *, epochs_changed: bool = False
    ) -> tuple[Self, memoryview]:
        """Read a cursor, which may come from a stranger, from the front of ``data``; returns the rest of that too.

        A source that had given all its epochs goes on with the next one where it may have more now
        (``epochs_changed``). Raises ``ProtocolError`` for what drawing by ``plan`` cannot lead to.
        """
        try:
            epoch, opened, next_open, count, drawn, faults = SOURCE_FORMAT.unpack_from(data)
            end = SOURCE_FORMAT.size + count * SHARD_FORMAT.size
            shards = [OpenShard(*parts) for parts in SHARD_FORMAT.iter_unpack(data[SOURCE_FORMAT.size : end])]
        except struct.error as error:
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is cut short") from error
        cursor = cls(plan, epoch, opened, next_open, shards, drawn, faults)
        if epochs_changed and not shards and plan.has_epoch(epoch + 1):
            cursor.epoch += 1
            cursor._open_first()
        elif len(shards) != count or not cursor._is_possible():
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is outside its shards and epochs")
        return cursor, data[end:]

    def _is_possible(self) -> bool:
        """Return whether drawing could have led here."""
        plan, at_once = self.plan, self.plan.open_at_once
        if not at_once <= self.opened <= plan.shards or not plan.has_epoch(self.epoch) or not self._can_count_on():
            return False
        been_opened = set(plan.shard_order(self.epoch)[: self.opened])
        distinct = {shard.shard for shard in self.open}
        all_opened = self.opened == plan.shards
        return (
            len(distinct) == len(self.open) <= at_once
            and distinct <= been_opened
            and (len(self.open) == at_once or all_opened)
            and (bool(self.open) or (self.drawn == 0 and not plan.has_epoch(self.epoch + 1)))
            and self.next_open < max(len(self.open), 1)
            and all((shard.offset == 0) == (shard.first_sample == 0) for shard in self.open)
        )

    def _can_count_on(self) -> bool:
        """Return whether counters are far from the widest that a snapshot holds."""
        firsts = [shard.first_sample for shard in self.open]
        return max(self.epoch, self.faults) < COUNT_LIMIT and max(self.drawn, *firsts, 0) < SUM_LIMIT


def integer_weights(weights: Iterable[float]) -> list[int]:
    """Return integers in the ratio of ``weights``, which are read as decimals: 0.1 is a tenth."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in fractions))
    return [int(f * scale) for f in fractions]


SIZES: dict[MixBy, Callable[[int, int], int]] = {
    MixBy.TOKENS: lambda samples, ids: ids,
    MixBy.SAMPLES: lambda samples, ids: samples,
}


class OrderCursor:
    """Cursor in the order of the whole mixture: one for each source, which are compared in integers.

    ``advance`` moves it by a sample, ``advance_by`` by a run of them.
    """

    def __init__(self, sources: list[SourceCursor], mixing: Mixing) -> None:
        self.sources = sources
        self.mixing = mixing
        self._size = SIZES[mixing.by]
        # Virtual times are sizes by weight, times ``common``, so that all of them are integers.
        self._common = math.lcm(*(source.plan.weight for source in sources))
        self._scale = [self._common // source.plan.weight for source in sources]
        self._count_live()

    @classmethod
    def at_start(cls, plans: Iterable[SourceOrderPlan], mixing: Mixing) -> Self:
        """Return the cursor before the first sample of all."""
        return cls([SourceCursor.at_start(plan) for plan in plans], mixing)

    def _count_live(self) -> None:
        self._live = [number for number, source in enumerate(self.sources) if source.live]
        if self.mixing.on_end is OnEnd.STOP and len(self._live) < len(self.sources):
            self._live = []
        self._weight = sum(self.sources[number].plan.weight for number in self._live)
        self._drawn = sum(self.sources[number].drawn for number in self._live)
        self._virtual_start = [source.drawn * scale for source, scale in zip(self.sources, self._scale, strict=True)]
        # Of each source's next sample, where it was needed so far.
        self._virtual_finish: list[int | None] = [None] * len(self.sources)

    @property
    def only_source(self) -> int | None:
        """Number of the source that gives all samples until it ends; ``None`` while there are several, or none."""
        return self._live[0] if len(self._live) == 1 else None

    def choose(self, next_ids: Sequence[Callable[[], int]]) -> int | None:
        """Return the number of the source that gives the next sample; ``None`` at the end.

        ``next_ids`` tell, for each source, how many ids its next sample has; one is asked where that decides.
        """
        if len(self._live) < 2:
            return self._live[0] if self._live else None
        virtual_time = self._drawn * self._common // self._weight
        chosen, earliest = None, 0
        for number in self._live:
            if self._virtual_start[number] > virtual_time:
                continue
            finish = self._virtual_finish[number]
            if finish is None:
                finish = self._virtual_start[number] + self._size(1, next_ids[number]()) * self._scale[number]
                self._virtual_finish[number] = finish
            if chosen is None or finish < earliest:
                chosen, earliest = number, finish
        return chosen

    def advance(self, number: int, ids: int, facts: BlockFacts) -> None:
        """Move behind the next sample of source ``number``, which has so many ``ids``."""
        source, size = self.sources[number], self._size(1, ids)
        source.drawn += size
        if len(self._live) > 1:
            self._drawn += size
            self._virtual_start[number] += size * self._scale[number]
            self._virtual_finish[number] = None
        source.advance(facts)
        if not source.open:
            self.reset_shares()

    def advance_by(self, number: int, draws: int, ids: int) -> None:
        """Move behind ``draws`` samples of the only source, none of them the first or last of its block."""
        source = self.sources[number]
        source.drawn += self._size(draws, ids)
        source.advance_by(draws)

    def reset_shares(self) -> None:
        """Forget what sources led or lagged by."""
        for source in self.sources:
            source.drawn = 0
        self._count_live()

    def clone(self) -> OrderCursor:
        """Return a cursor at the same place that moves on its own."""
        return OrderCursor([source.clone() for source in self.sources], self.mixing)

    def encode(self) -> bytes:
        """Return the cursors of all sources as bytes, one after the other."""
        return b"".join(source.encode() for source in self.sources)


class DeferredCursor(NamedTuple):
    """A place in the order: ``draws`` samples, of so many ids, of the only source behind another place.

    Most are asked for by nobody, and a cursor takes longer to copy than a sample to draw.
    """

    start: OrderCursor
    source: int = 0
    draws: int = 0
    ids: int = 0

    def resolve(self) -> OrderCursor:
        """Return the cursor at the place; only to look at."""
        if not self.draws:
            return self.start
        cursor = self.start.clone()
        cursor.advance_by(self.source, self.draws, self.ids)
        return cursor
