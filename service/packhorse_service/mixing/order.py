"""The order of samples: which source gives the next one, and where in it that sample is.

Everything here is integers, so the order can be copied, saved and replayed exactly. It is a pure
function of the plan and of how many ids each drawn sample has; padding and the layout never enter.

Within a source: each epoch permutes the shards; ``open_shards`` of them are open at once and give one
sample each in turn; a shard that ends is replaced in its place by the next one of the permutation.

Between sources, sizes are ids or samples (``MixBy``). Imagine a fluid that takes from every source i at its
share s of all that is drawn: it takes a sample of size l that follows d sizes of its source while the total
grows from d/s, the *start*, to (d+l)/s, the *finish*. The next sample is the one of earliest finish among
those whose start is not ahead of the total, ties by number (WF²Q, Bennett and Zhang 1996). There is always
one, as the starts' mean by share is the total.

*Bound.* After every draw each source is within one sample L, the longest, of its share of what was drawn.

* Above: when drawn, d <= s·total. So afterwards the source leads by at most l - s·l <= L.
* A sample ends at most L behind its finish f. Let T be the total when last a sample of a later finish was
  drawn. All drawn since then and up to ours finish by f in the fluid, and start there after T: else one of
  them had been chosen at T. The fluid takes them between T and f, so they amount to f - T at most, and ours
  ends by T + L + (f - T) at the latest; without such a T, by f itself.
* Below: a source lags most just before it is drawn (or would be), at a total t. As t + l <= f + L, it lags
  by s·t - d <= s·(f + L - l) - d = l + s·(L - l) <= L.

When a source ends, the others begin anew from equal standing: what they led or lagged by is forgotten, so
nobody catches up in a burst, and the bound holds from there on for the shares of those that are left.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, Self

from packhorse.errors import ProtocolError
from packhorse_service.mixing.permutation import permutation, seed_of

__all__ = [
    "BlockFacts",
    "MixBy",
    "Mixing",
    "OnEnd",
    "OpenShard",
    "OrderCursor",
    "SourceCursor",
    "SourceOrderPlan",
    "integer_weights",
]

SOURCE_FORMAT = struct.Struct("<IIHHQQ")  # epoch, opened, turn, open shards, drawn, faults
SHARD_FORMAT = struct.Struct("<IQQII")  # shard, block offset, first sample, index in the block, its checksum
COUNT_LIMIT, SUM_LIMIT = 1 << 31, 1 << 62  # a snapshot that holds more was made up: counting on would not fit one


class MixBy(StrEnum):
    """What a source's weight is a share of."""

    TOKENS = "tokens"  # ids of its samples, as stored
    SAMPLES = "samples"


class OnEnd(StrEnum):
    """What happens when one of several sources has given all its epochs."""

    GO_ON = "go_on"  # with the rest, at their weights
    STOP = "stop"  # the stream ends


@dataclass(frozen=True, slots=True)
class Mixing:
    """How sources are mixed."""

    by: MixBy = MixBy.TOKENS
    on_end: OnEnd = OnEnd.GO_ON


class BlockFacts(NamedTuple):
    """What the order needs to know of a block: its samples, and where the next one begins."""

    samples: int
    next_offset: int | None
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrderPlan:
    """What never changes about a source's order. ``epochs`` is ``None`` where it repeats for ever."""

    name: str
    shards: int
    weight: int  # positive; relative to the other sources'
    epochs: int | None
    open_shards: int
    shuffle: bool
    seed: int

    @property
    def open_at_once(self) -> int:
        """Shards that are open at the beginning of an epoch."""
        return min(self.open_shards, self.shards)


@dataclass(slots=True)
class OpenShard:
    """A shard being read: the block it is in, and the next sample within that block."""

    shard: int
    offset: int = 0
    first_sample: int = 0
    index: int = 0
    checksum: int = 0  # of the block, where samples of it were drawn; 0 = not known


@lru_cache(maxsize=256)
def _shard_order(plan: SourceOrderPlan, epoch: int) -> tuple[int, ...]:
    if not plan.shuffle:
        return tuple(range(plan.shards))
    return tuple(permutation(plan.shards, seed_of(plan.seed, plan.name, epoch)).tolist())


@dataclass(slots=True)
class SourceCursor:
    """Where one source stands. ``advance``, and ``advance_by``, are the only ways it moves."""

    plan: SourceOrderPlan
    epoch: int = 0
    opened: int = 0  # shards of this epoch's permutation that were opened so far
    turn: int = 0  # which open shard gives the next sample
    open: list[OpenShard] = field(default_factory=list)
    drawn: int = 0  # ids or samples, since a source last ended
    faults: int = 0

    @classmethod
    def at_start(cls, plan: SourceOrderPlan) -> Self:
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

    def in_turn(self) -> list[OpenShard]:
        """The open shards, from the one that gives the next sample."""
        return self.open[self.turn :] + self.open[: self.turn]

    def next_shard(self) -> int | None:
        """The shard that will be opened next, if any: worth loading ahead."""
        if self.opened < self.plan.shards:
            return _shard_order(self.plan, self.epoch)[self.opened]
        return _shard_order(self.plan, self.epoch + 1)[0] if self._repeats() else None

    def advance(self, facts: BlockFacts) -> None:
        """The current sample was drawn: move to the next."""
        shard = self.open[self.turn]
        shard.index += 1
        shard.checksum = facts.checksum
        if shard.index < facts.samples:
            self.turn = (self.turn + 1) % len(self.open)
        elif facts.next_offset is not None:
            shard.offset, shard.first_sample = facts.next_offset, shard.first_sample + facts.samples
            shard.index = shard.checksum = 0
            self.turn = (self.turn + 1) % len(self.open)
        else:
            self._close_current()

    def advance_by(self, draws: int) -> None:
        """So many samples were drawn, none of them the first or the last of its block: move behind them."""
        rounds, more = divmod(draws, len(self.open))
        for turn, shard in enumerate(self.in_turn()):
            shard.index += rounds + (turn < more)
        self.turn = (self.turn + draws) % len(self.open)

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

    def clone(self) -> SourceCursor:
        shards = [OpenShard(s.shard, s.offset, s.first_sample, s.index, s.checksum) for s in self.open]
        return SourceCursor(self.plan, self.epoch, self.opened, self.turn, shards, self.drawn, self.faults)

    def encode(self) -> bytes:
        head = SOURCE_FORMAT.pack(self.epoch, self.opened, self.turn, len(self.open), self.drawn, self.faults)
        pack = SHARD_FORMAT.pack
        return head + b"".join([pack(s.shard, s.offset, s.first_sample, s.index, s.checksum) for s in self.open])

    @classmethod
    def decode(
        cls, plan: SourceOrderPlan, data: memoryview, *, epochs_changed: bool = False
    ) -> tuple[Self, memoryview]:
        """Read one source's place, which may come from a stranger. Returns the rest of the data too.

        A source that had given all its epochs goes on with the next one where it may have more now.
        """
        try:
            epoch, opened, turn, count, drawn, faults = SOURCE_FORMAT.unpack_from(data)
            end = SOURCE_FORMAT.size + count * SHARD_FORMAT.size
            shards = [OpenShard(*parts) for parts in SHARD_FORMAT.iter_unpack(data[SOURCE_FORMAT.size : end])]
        except struct.error as error:
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is cut short") from error
        order = cls(plan, epoch, opened, turn, shards, drawn, faults)
        if epochs_changed and not shards and order._repeats():
            order.epoch += 1
            order._open_first()
        elif len(shards) != count or not order._is_possible():
            raise ProtocolError(f"snapshot: the place of source {plan.name!r} is outside its shards and epochs")
        return order, data[end:]

    def _is_possible(self) -> bool:
        """Whether drawing could have led here."""
        at_once = self.plan.open_at_once
        if not at_once <= self.opened <= self.plan.shards or not self._in_epochs() or not self._can_count_on():
            return False
        been_opened = set(_shard_order(self.plan, self.epoch)[: self.opened])
        distinct = {shard.shard for shard in self.open}
        all_opened = self.opened == self.plan.shards
        return (
            len(distinct) == len(self.open) <= at_once
            and distinct <= been_opened
            and (len(self.open) == at_once or all_opened)
            and (bool(self.open) or (self.drawn == 0 and not self._repeats()))
            and self.turn < max(len(self.open), 1)
            and all((shard.offset == 0) == (shard.first_sample == 0) for shard in self.open)
        )

    def _can_count_on(self) -> bool:
        """Whether counters are far from the widest that a snapshot holds."""
        firsts = [shard.first_sample for shard in self.open]
        return max(self.epoch, self.faults) < COUNT_LIMIT and max(self.drawn, *firsts, 0) < SUM_LIMIT

    def _in_epochs(self) -> bool:
        return self.plan.epochs is None or self.epoch < self.plan.epochs


def integer_weights(weights: Iterable[float]) -> list[int]:
    """Integers in the ratio of ``weights``, which are read as decimals: 0.1 is a tenth."""
    fractions = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(f.denominator for f in fractions))
    return [int(f * scale) for f in fractions]


SIZES: dict[MixBy, Callable[[int, int], int]] = {
    MixBy.TOKENS: lambda samples, ids: ids,
    MixBy.SAMPLES: lambda samples, ids: samples,
}


class OrderCursor:
    """The order of the whole mixture: one place a source, compared in integers.

    ``advance`` moves it by a sample, ``advance_by`` by a run of them.
    """

    def __init__(self, sources: list[SourceCursor], mixing: Mixing) -> None:
        self.sources = sources
        self.mixing = mixing
        self._size = SIZES[mixing.by]
        # Times of the fluid are sizes by weight, times ``common``.
        self._common = math.lcm(*(source.plan.weight for source in sources))
        self._scale = [self._common // source.plan.weight for source in sources]
        self._count_live()

    def _count_live(self) -> None:
        self._live = [number for number, source in enumerate(self.sources) if source.live]
        if self.mixing.on_end is OnEnd.STOP and len(self._live) < len(self.sources):
            self._live = []
        self._weight = sum(self.sources[number].plan.weight for number in self._live)
        self._drawn = sum(self.sources[number].drawn for number in self._live)
        self._start = [source.drawn * scale for source, scale in zip(self.sources, self._scale, strict=True)]
        self._finish: list[int | None] = [None] * len(self.sources)  # of the next sample, where it was needed

    @property
    def alone(self) -> int | None:
        """Number of the source that gives all samples until it ends; ``None`` while there are several, or none."""
        return self._live[0] if len(self._live) == 1 else None

    def choose(self, next_ids: Callable[[int], int]) -> int | None:
        """Number of the source that gives the next sample; ``None`` at the end.

        ``next_ids`` tells how many ids a source's next sample has; it is asked where that decides.
        """
        if len(self._live) < 2:
            return self._live[0] if self._live else None
        now = self._drawn * self._common // self._weight
        chosen, earliest = None, 0
        for number in self._live:
            if self._start[number] > now:
                continue
            finish = self._finish[number]
            if finish is None:
                finish = self._start[number] + self._size(1, next_ids(number)) * self._scale[number]
                self._finish[number] = finish
            if chosen is None or finish < earliest:
                chosen, earliest = number, finish
        return chosen

    def advance(self, number: int, ids: int, facts: BlockFacts) -> None:
        """The next sample of a source was drawn."""
        source, size = self.sources[number], self._size(1, ids)
        source.drawn += size
        if len(self._live) > 1:
            self._drawn += size
            self._start[number] += size * self._scale[number]
            self._finish[number] = None
        source.advance(facts)
        if not source.open:
            self.reset_shares()

    def advance_by(self, number: int, draws: int, ids: int) -> None:
        """So many samples of a source that is ``alone`` were drawn, none of them the first or last of its block."""
        source = self.sources[number]
        source.drawn += self._size(draws, ids)
        source.advance_by(draws)

    def reset_shares(self) -> None:
        """What sources led or lagged by is forgotten."""
        for source in self.sources:
            source.drawn = 0
        self._count_live()

    def clone(self) -> OrderCursor:
        return OrderCursor([source.clone() for source in self.sources], self.mixing)

    def encode(self) -> bytes:
        return b"".join(source.encode() for source in self.sources)
