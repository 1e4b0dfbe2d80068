"""Every stage of the data path that has state, as a machine that can be saved at any point and made again.

What is saved is what the product saves: places, pending pieces and marks, and snapshots. A machine made again
from that must give the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from packhorse.contract.batch_contract import BatchContract, Packing, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse_service.mixing.order import BlockFacts, Mixing, OnEnd, OrderCursor, SourceCursor, SourceOrderPlan
from packhorse_service.mixing.over_length import CutLength, OverLength
from packhorse_service.mixing.piece import Piece
from packhorse_service.mixing.replay_log import StreamCursor
from packhorse_service.packing.modes import micro_batcher_for
from packhorse_service.packing.packer import packer_for
from packhorse_service.packing.packing_plan import PackingAlgorithm, PackingPlan
from packhorse_service.pipeline.run import Pipeline
from tests.service.corpus import MemoryCorpus, consecutive, inline_engine, make_block, make_plan

__all__ = ["STAGES", "Machine", "Saved", "machine", "outputs", "rest_of"]

Saved = Any  # what travels to the other process: plain values and arrays


class Machine(Protocol):
    """One stage with its input, run one output at a time."""

    def next(self) -> object | None:
        """The next output; ``None`` at the end."""

    def save(self) -> Saved:
        """All that is needed to go on elsewhere."""


Stage = Callable[[Path, Saved | None], Machine]  # from the start, or as saved


def outputs(machine: Machine) -> Iterator[object]:
    return iter(machine.next, None)


def rest_of(name: str, base: Path, saved: Saved) -> list[object]:
    """Run in another process: all that a machine still gives."""
    return list(outputs(STAGES[name](base, saved)))


# Mixing ----------------------------------------------------------------------------------------------


class MixingMachine:
    """Three sources of unlike lengths and epochs, by tokens; a sample's ids follow from where it is."""

    def __init__(self, _base: Path, saved: bytes | None) -> None:
        plans = [
            SourceOrderPlan(
                name=f"{i}",
                shards=3 + i,
                weight=3 - i,
                epochs=1 + i,
                open_shards=2,
                shuffle=i != 1,
                seed=5,
            )
            for i in range(3)
        ]
        sources, rest = [], memoryview(saved or b"")
        for plan in plans:
            source, rest = (SourceCursor.at_start(plan), rest) if saved is None else SourceCursor.decode(plan, rest)
            sources.append(source)
        self._order = OrderCursor(sources, Mixing(on_end=OnEnd.GO_ON))

    def _ids(self, source: int) -> int:
        at = self._order.sources[source].current
        return 2 + (at.shard * 37 + at.first_sample * 11 + at.index * 5 + source) % 23

    def next(self) -> object | None:
        source = self._order.choose([partial(self._ids, source) for source in range(3)])
        if source is None:
            return None
        at = self._order.sources[source].current
        drawn = (source, at.shard, at.offset, at.index)
        facts = BlockFacts(2 + at.shard % 3, at.offset + 512 if at.offset < 1024 else None)
        self._order.advance(source, self._ids(source), facts)
        return drawn

    def save(self) -> bytes:
        return self._order.encode()


# Samples ---------------------------------------------------------------------------------------------


class SamplesMachine:
    """Pieces of two sources with samples over length, of which now and then one is packed."""

    def __init__(self, _base: Path, saved: tuple[list[bytes], list[CutLength], list[int], int] | None) -> None:
        corpus = MemoryCorpus()
        shards = [[make_block(consecutive([5, 30, 9])), make_block(consecutive([2, 61], 99), keys=["a", "b"])]]
        shards += [[make_block(consecutive([17, 3, 8], 200))], [make_block(consecutive([40], 300))]]
        corpus.add(shards, name="long", over_length=OverLength.SPLIT, epochs=3)
        corpus.add([[make_block(consecutive([4, 70, 6], 7_000))]], name="drop", over_length=OverLength.DROP, epochs=2)
        self._stream, self._turn, self._pending = corpus.stream(16), 0, list[Piece]()
        if saved is not None:
            cursors, cut_lengths, packed, self._turn = saved
            sources = [
                SourceCursor.decode(s.order, memoryview(p))[0] for s, p in zip(corpus.settings, cursors, strict=True)
            ]
            cursor = StreamCursor(OrderCursor(sources, Mixing()), cut_lengths, np.array(packed, np.uint8))
            self._pending = self._stream.resume(cursor)

    def next(self) -> object | None:
        pieces = self._stream.draw()
        self._pending += pieces or []
        if pieces is None and not self._pending:
            return None
        self._turn += 1
        settled = None
        if self._pending and (pieces is None or self._turn % 3):
            settled = self._pending.pop(self._turn * 7 % len(self._pending))
            self._stream.mark_packed([settled.number])
        return [_named(piece) for piece in pieces or []], settled and _named(settled)

    def save(self) -> Saved:
        cursor = self._stream.cursor()
        cursors = [source.encode() for source in cursor.order.sources]
        return cursors, list(cursor.cut_lengths), cursor.packed.tolist(), self._turn


def _named(piece: Piece) -> tuple[int, int, int, int, int]:
    first = int(piece.block.tokens[0])
    return piece.source, first, piece.begin, piece.end, piece.slots


# Packing ---------------------------------------------------------------------------------------------


class PackerMachine:
    """Packs of a lookahead over given sizes."""

    def __init__(self, algorithm: PackingAlgorithm, saved: tuple[list[tuple[int, int]], bool, int] | None) -> None:
        self._packer = packer_for(PackingPlan(capacity=40, lookahead=200, max_segments=5, algorithm=algorithm))
        pending, closed, self._arrived = saved or ([], False, 0)
        for sample, units in pending:
            self._packer.add(sample, units)
        if closed:
            self._packer.close()

    def next(self) -> object | None:
        while self._packer.wants_more and self._arrived < 150:
            self._packer.add(self._arrived, 1 + self._arrived * self._arrived * 31 % 40)
            self._arrived += 1
        return self._packer.next_pack() if len(self._packer) else None

    def save(self) -> Saved:
        return list(self._packer.pending()), self._packer.closed, self._arrived


class MicroBatcherMachine:
    """Micro-batches of one packing mode from given documents."""

    def __init__(self, contract: dict[str, Any], saved: tuple[list[int], int, int] | None) -> None:
        resolved = resolve(
            BatchContract(**contract), ParallelLayout(), seq_length=32, global_batch_size=4, vocab_size=9_000
        )
        self._batcher = micro_batcher_for(resolved, PackingPlan(capacity=32, lookahead=96))
        joined = resolved.concatenated
        longest = 100 if resolved.packing is Packing.CONCAT else 33
        block = make_block(consecutive([2 + i * i * 13 % (longest - 1) for i in range(60)]))
        ends = block.offsets.tolist()
        self._pieces = [
            Piece(i, 0, 0, block, i, ends[i], ends[i + 1], ends[i + 1] - ends[i] - (not joined)) for i in range(60)
        ]
        self._pending, consumed, self._arrived = saved or ([], 0, 0)
        self._pending = list(self._pending)
        self._batcher.resume([self._pieces[number] for number in self._pending], consumed)

    def next(self) -> object | None:
        while self._batcher.wants_more and self._arrived < len(self._pieces):
            self._batcher.add([self._pieces[self._arrived]])
            self._pending.append(self._arrived)
            self._arrived += 1
        packed = self._batcher.next()
        if packed is None:
            return None
        self._pending = [number for number in self._pending if number not in packed.finished]
        return [[_named(piece) for piece in segment] for segment in packed.segments]

    def save(self) -> Saved:
        return self._pending, self._batcher.consumed, self._arrived


# The whole path --------------------------------------------------------------------------------------


class PipelineMachine:
    """Framed steps of two sources of the corpus that lies at ``base``."""

    def __init__(self, base: Path, saved: bytes | None, **sections: Any) -> None:
        of_each = {"epochs": 2, "over_length": "split"}
        sources = {name: {"shards": f"{name}/part-*.tar", **of_each} for name in ("docs", "chat")}
        plan = make_plan(base, sources, **sections)
        self._pipeline, self._snapshot = Pipeline(plan, inline_engine(plan)), saved
        self._pipeline.restore(saved)

    def next(self) -> object | None:
        step = self._pipeline.next_step()
        if step is None:
            return None
        self._snapshot = step.snapshot
        views = sorted(step.views.items(), key=lambda item: item[0][:2])
        rows = [(view.body.row_digest, bytes(view.payload)) for _, of_key in views for view in of_key]
        return step.step, hashlib.blake2b(repr(rows).encode()).hexdigest(), step.snapshot

    def save(self) -> bytes | None:
        return self._snapshot


MODES: dict[str, dict[str, Any]] = {
    "online": {},
    "in_batch": {"packing": "in_batch", "micro_batch_size": 2},
    "none": {"packing": "none", "micro_batch_size": 2},
    "concat": {"packing": "concat"},
    "an endless run": {"packing": "concat", "isolate_documents": False, "micro_batch_size": 2},
}
PATHS: dict[str, dict[str, Any]] = {
    **{mode: {"contract": contract} for mode, contract in MODES.items()},
    "window": {"packing": {"window": 3, "lookahead": 4}, "layout": {"data": 2}},
    "first-fit decreasing": {"packing": {"algorithm": "first_fit_decreasing"}},
    "cut samples": {"contract": {"seq_length": 24}},
}


def _packer(algorithm: PackingAlgorithm) -> Stage:
    return lambda _base, saved: PackerMachine(algorithm, saved)


def _micro_batcher(contract: dict[str, Any]) -> Stage:
    return lambda _base, saved: MicroBatcherMachine(contract, saved)


def _pipeline(sections: dict[str, Any]) -> Stage:
    return lambda base, saved: PipelineMachine(base, saved, **sections)


STAGES: dict[str, Stage] = {
    "mixing": MixingMachine,
    "samples": SamplesMachine,
    **{f"packer: {algorithm}": _packer(algorithm) for algorithm in PackingAlgorithm},
    **{f"micro-batcher: {mode}": _micro_batcher(contract) for mode, contract in MODES.items()},
    **{f"pipeline: {path}": _pipeline(sections) for path, sections in PATHS.items()},
}


def machine(name: str, base: Path, saved: Saved | None = None) -> Machine:
    return STAGES[name](base, saved)
