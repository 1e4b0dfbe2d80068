"""START HERE. The data path, top to bottom, from shards to framed steps.

1. sources   ``sources.shards``   which shards exist: names and sizes, the manifest
2. loading   ``loading``          blocks of a shard to ``TokenBlock``s (``decoding``), in worker processes
3. mixing    ``mixing``           which source gives the next sample, and from which open shard
             ``stream``           samples in that order, cut to length; remembers what is not packed yet
             ``pieces``           what they are cut to; runs of those that are drawn in one go
             ``cutting``          what is kept of a sample over length; another length on resuming
4. packing   ``assembling``       samples to micro-batches, by packing mode
             ``packing``          a lookahead of samples to packs, FIFO fill and exact tail
5. planning  ``windows``          the micro-batches of several steps to those steps, if asked for
             ``planning``         a step's micro-batches to (data-parallel rank, index), balanced by cost
             ``row_building``     a micro-batch to the arrays of one physical row
6. framing   ``framing``          a row to each rank's view of it, and the snapshot behind the step

Everything here is a pure function of the plan and the data. The plan is described once (``StreamPlan``),
built from the configuration by ``plan_stream``, and run step by step by ``Pipeline``. ``sessions`` and
``server`` carry the steps to the readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from packhorse.contract.batch_contract import BatchContract, Packing, Remainder, ResolvedContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ConfigError, ContractError, SourceError
from packhorse.rows.row import SampleKey
from packhorse.rules import RuleInput, Severity, check
from packhorse_service.config.serve_config import ENDLESS, TRAIN, ServeConfig, SourceConfig
from packhorse_service.framing import FramedStep, frame_step
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.engine import BlockStore, Engine, InlineEngine, Load, ProcessEngine
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from packhorse_service.mixing.open_blocks import SourcePlan, compressed_shard_warnings
from packhorse_service.mixing.order import Mixing, OrderCursor, SourceOrderPlan, integer_weights
from packhorse_service.mixing.sample_stream import DrawnSample, SampleStream
from packhorse_service.mixing.source_counts import PipelineProgress, SourceCounts
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.packing.modes import PackedMicroBatch, micro_batcher_for
from packhorse_service.packing.packer import packing_plan
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.pipeline.config_fingerprint import fingerprint_config
from packhorse_service.pipeline.provenance import Provenance
from packhorse_service.pipeline.resume import adapt_snapshot, resume_warnings
from packhorse_service.planning.balance import CostModel, assign_to_ranks
from packhorse_service.planning.balance_window import BalanceWindow, WindowPlan, window_plan
from packhorse_service.planning.rows import build_rows, count_loss_tokens
from packhorse_service.snapshot.codec import (
    SNAPSHOT_LIMIT_BYTES,
    PackShape,
    StreamSnapshot,
    decode_snapshot,
    encode_snapshot,
    snapshot_bound,
)
from packhorse_service.snapshot.fingerprint import StreamFingerprint
from packhorse_service.sources.shards import expand_shards

__all__ = [
    "Pipeline",
    "PipelineObserver",
    "PlannedStep",
    "StreamPlan",
    "cut_length",
    "make_engine",
    "open_tokenizer",
    "plan_stream",
    "resolve_contract",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """One stream, described: all that decides its bytes."""

    name: str
    layout: ParallelLayout
    contract: ResolvedContract
    sources: tuple[SourcePlan, ...]
    mixing: Mixing
    decoding: Mapping[str, DecodingSpec]
    packing: PackingPlan
    cost: CostModel
    window: WindowPlan
    fingerprint: StreamFingerprint
    allow_changes: frozenset[str]  # of the fingerprint, when resuming
    warnings: tuple[str, ...]
    with_keys: bool
    passes: bool = False  # read again and again, each time to its end


def plan_stream(config: ServeConfig, base: Path, name: str = TRAIN) -> StreamPlan:
    """Describe one stream of a configuration whose paths are relative to ``base``.

    Raises ``ConfigError``, ``SourceError`` (shards) or ``ContractError`` (all broken rules at once).
    """
    config = config.of_stream(name)
    layout, declared = config.layout, config.contract
    spec, tokenizer = open_tokenizer(config, base)
    contract = resolve_contract(declared, layout, tokenizer)
    broken = check(RuleInput(layout, contract, declared.trainer or TrainerFacts()))
    if any(violation.severity is Severity.ERROR for violation in broken):
        raise ContractError("the contract does not hold:\n" + "\n".join(f"  {v}" for v in broken))
    _check_snapshot_size(config)
    weights = integer_weights(source.weight for source in config.sources.values())
    settings = tuple(
        _setting(source_name, source, weight, config, base)
        for (source_name, source), weight in zip(config.sources.items(), weights, strict=True)
    )
    decoding = {
        source_name: DecodingSpec(
            name=source_name,
            format=source.format,
            tokenizer=spec,
            chat_template=_template(source, source_name, base),
            date=config.date,
            vocab_size=contract.vocab_size,
            block_bytes=config.loading.block_bytes,
        )
        for source_name, source in config.sources.items()
    }
    chosen = config.packing
    packing = packing_plan(contract, chosen.lookahead, chosen.tail_slots, chosen.algorithm)
    cost = CostModel(6 * config.packing.hidden_size)
    return StreamPlan(
        name=name,
        layout=layout,
        contract=contract,
        sources=settings,
        mixing=Mixing(config.mixing.by, config.mixing.on_end),
        decoding=decoding,
        packing=packing,
        cost=cost,
        window=window_plan(config.packing.window, contract, packing, cost, config.seed),
        fingerprint=fingerprint_config(config, tokenizer, settings, decoding, packing, cost, contract, layout),
        allow_changes=frozenset(config.resume.allow_changes),
        warnings=(*map(str, broken), *compressed_shard_warnings(settings)),
        with_keys=config.keys,
        passes=name != TRAIN,
    )


def open_tokenizer(config: ServeConfig, base: Path) -> tuple[TokenizerSpec | None, Tokenizer | None]:
    """The tokenizer of a configuration, and what a loader needs to open it too."""
    named = config.tokenizer
    if named is None:
        return None, None
    spec = TokenizerSpec(**{**named.model_dump(), "file": str(base / named.file)})
    return spec, Tokenizer(spec)


def resolve_contract(declared: BatchContract, layout: ParallelLayout, tokenizer: Tokenizer | None) -> ResolvedContract:
    """The contract as it is served. Raises ``ConfigError`` that names what it lacks."""
    vocab_size = declared.vocab_size or (tokenizer.vocab_size if tokenizer is not None else None)
    required = {
        "seq_length": declared.seq_length,
        "global_batch_size": declared.global_batch_size,
        "vocab_size": vocab_size,
    }
    missing = [name for name, value in required.items() if value is None]
    if missing:
        fields = ", ".join(f"contract.{name}" for name in missing)
        raise ConfigError(f"{fields}: required" + ("" if tokenizer else " (a tokenizer would give vocab_size)"))
    return resolve(declared, layout, **{name: value for name, value in required.items() if value is not None})


def _template(source: SourceConfig, name: str, base: Path) -> str | None:
    if source.chat_template is None:
        return None
    try:
        return (base / source.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sources.{name}.chat_template={source.chat_template!r} cannot be read: {error}") from error


def _check_snapshot_size(config: ServeConfig) -> None:
    """Refuse what could not be resumed: a snapshot travels to every reader with each step."""
    open_shards = sum(source.open_shards for source in config.sources.values())
    if snapshot_bound(len(config.sources), open_shards) > SNAPSHOT_LIMIT_BYTES:
        raise ConfigError(
            f"{len(config.sources)} sources with {open_shards} open shards in all need snapshots of more than "
            f"{SNAPSHOT_LIMIT_BYTES >> 10} KiB; lower open_shards"
        )


def _setting(name: str, source: SourceConfig, weight: int, config: ServeConfig, base: Path) -> SourcePlan:
    try:
        shards = expand_shards(source.shards, base)
    except SourceError as error:
        raise SourceError(f"sources.{name}.shards: {error}") from error
    order = SourceOrderPlan(
        name=name,
        shards=len(shards),
        weight=weight,
        epochs=None if source.epochs == ENDLESS else int(source.epochs),
        open_shards=source.open_shards,
        shuffle=source.shuffle,
        seed=config.seed,
    )
    return SourcePlan(order=order, shards=shards, over_length=source.over_length, skip_budget=source.skip_budget)


def make_engine(config: ServeConfig, plan: StreamPlan) -> Engine:
    """The loading engine of a configuration."""
    make_loader = partial(_make_load, dict(plan.decoding))
    # Built here too: a template that does not compile is told better than by a worker that cannot start.
    load = make_loader()
    return ProcessEngine(config.loading.workers, make_loader) if config.loading.workers else InlineEngine(load)


def _make_load(specs: Mapping[str, DecodingSpec]) -> Load:
    return BlockLoader(specs).load


def cut_length(plan: StreamPlan) -> int | None:
    """Slots at which an over-long sample is cut; none where documents are cut to the rows they fall into."""
    lengths = {Packing.CONCAT: None, Packing.ONLINE: plan.packing.capacity * plan.contract.segment_multiple}
    return lengths.get(plan.contract.packing, plan.contract.seq_length)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step before its rows are built.

    Where a finite stream ends, ``micro_batches`` are too few; ``ranks`` then names numbers behind the last: fillers.
    """

    step: int
    micro_batches: Sequence[PackedMicroBatch]  # in the order of the pack stream
    costs: Sequence[int]  # of each
    supervised: Sequence[int]  # slots of each that are trained on
    ranks: Sequence[Sequence[int]]  # ranks[rank][index]: which micro-batch
    snapshot: bytes  # of the stream behind this step

    @property
    def fillers(self) -> int:
        """Micro-batches that are missing."""
        return sum(map(len, self.ranks)) - len(self.micro_batches)


class PipelineObserver(Protocol):
    """Is told what happens, in the order in which it happens; changes nothing."""

    def drawn(self, sample: DrawnSample) -> None:
        """A sample was drawn: it waits to be packed."""

    def packed(self, micro_batch: PackedMicroBatch) -> None:
        """The next micro-batch of the pack stream."""


class Pipeline:
    """Runs a plan: whole steps in order, from the beginning or from a snapshot."""

    def __init__(self, plan: StreamPlan, engine: Engine, observer: PipelineObserver | None = None) -> None:
        self.plan = plan
        self._observer = observer
        self._blocks = BlockStore(engine)
        self._stream = SampleStream(
            plan.sources, self._blocks, cut_length(plan), plan.mixing, concatenated=plan.contract.concatenated
        )
        self._stream.on_drawn = None if observer is None else observer.drawn
        self._window = BalanceWindow(plan.window, self._next_micro_batch, self._snapshot)
        self.step = 0  # the next to make
        self._fresh()

    def _fresh(self) -> None:
        self._micro_batcher = micro_batcher_for(self.plan.contract, self.plan.packing)
        self._exhausted = False

    @property
    def counts(self) -> Mapping[str, SourceCounts]:
        """What became of all that each source gave."""
        return self._stream.counts

    @property
    def progress(self) -> PipelineProgress:
        """Where it stands, for those who watch from another thread: numbers that may be a draw apart."""
        epochs = [(order.epoch, order.opened) for order in self._stream.order.sources]
        return PipelineProgress(self.counts, epochs, self._blocks.loading, self._blocks.waiting_for)

    def next_step(self) -> FramedStep | None:
        """Make one whole step; ``None`` at the end of a finite stream."""
        planned = self.next_planned_step()
        return None if planned is None else self._framed(planned)

    def next_planned_step(self) -> PlannedStep | None:
        """Which samples the next step's micro-batches hold and who gets them, without building their rows."""
        assigned, size = self._window.next(), self.plan.window.packs
        if assigned is None:
            return None
        missing = size - len(assigned.micro_batches)
        if missing and self.plan.contract.remainder is Remainder.DROP:
            self._leave_over(assigned.micro_batches)
            return None
        supervised = list(map(count_loss_tokens, assigned.micro_batches))
        costs = [*assigned.costs, *assigned.costs[-1:] * missing]
        ranks = assign_to_ranks(costs, self.plan.layout.data, [*supervised, *[None] * missing])
        planned = PlannedStep(self.step, assigned.micro_batches, assigned.costs, supervised, ranks, assigned.snapshot)
        self.step += 1
        return planned

    def _snapshot(self, step: int) -> bytes:
        """Of the stream as it stands now, before ``step``."""
        contract, micro_batcher = self.plan.contract, self._micro_batcher
        shape = PackShape(contract.seq_length, contract.segment_multiple)
        cursor, window = self._stream.cursor(), self.plan.window.position()
        snapshot = StreamSnapshot(step, cursor, micro_batcher.consumed_unit, micro_batcher.consumed, shape, window)
        return encode_snapshot(snapshot, self.plan.fingerprint)

    def _framed(self, planned: PlannedStep) -> FramedStep:
        contract, layout = self.plan.contract, self.plan.layout
        rows = build_rows(planned.micro_batches, contract, map(self._keys, planned.micro_batches))
        if planned.fillers:
            rows += [rows[-1].as_filler()] * planned.fillers
        of_ranks = [[rows[number] for number in of_rank] for of_rank in planned.ranks]
        step = frame_step(planned.step, of_ranks, planned.snapshot, contract, layout, with_keys=self.plan.with_keys)
        step.provenance = Provenance(planned.micro_batches, planned.ranks, self.plan.sources)
        return step

    def _next_micro_batch(self) -> PackedMicroBatch | None:
        """The next micro-batch; ``None`` at the end."""
        stream, micro_batcher = self._stream, self._micro_batcher
        while micro_batcher.wants_more and not self._exhausted and not stream.at_snapshot_limit:
            pieces = stream.draw(micro_batcher.wanted)
            if pieces is None:
                self._exhausted = True
                break
            if pieces:
                micro_batcher.add(pieces)
        micro_batch = micro_batcher.next()
        if micro_batch is None:
            return None
        stream.mark_packed(micro_batch.finished, micro_batch.slots_by_source())
        if self._observer is not None:
            self._observer.packed(micro_batch)
        return micro_batch

    def _counts_of(self, source: int) -> SourceCounts:
        return self._stream.counts[self.plan.sources[source].order.name]

    def _leave_over(self, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """An incomplete last step is not made: what it was packed with is lost."""
        for source, slots in chain.from_iterable(each.slots_by_source().items() for each in micro_batches):
            self._counts_of(source).packed -= slots
            self._counts_of(source).dropped_remainder += slots

    def _keys(self, micro_batch: PackedMicroBatch) -> tuple[SampleKey, ...]:
        if not self.plan.with_keys:
            return ()
        sources = self.plan.sources
        return tuple(
            (sources[p.source].order.name, sources[p.source].shards[p.shard].name, p.block.keys[p.sample])
            for p in micro_batch.pieces
        )

    def begin_pass(self) -> bytes:
        """Stand at the beginning again, behind the end, which counts as a step; the snapshot of that place."""
        step = self.step + 1
        self.restore(None)
        self._window.begin(step)
        self.step = step
        return self._snapshot(step)

    def restore(self, snapshot: bytes | None) -> tuple[str, ...]:
        """Stand where the snapshot was taken, or at the beginning; returns what should be said of the rest.

        Raises ``ProtocolError`` or ``ContractError`` where it is not a snapshot of this stream.
        """
        if snapshot is None:
            self._fresh()
            self._window.begin(0)
            self.step = 0
            self._stream.restart()
            return ()
        plan, contract = self.plan, self.plan.contract
        first = OrderCursor.at_start((source.order for source in plan.sources), plan.mixing)
        read = decode_snapshot(snapshot, plan.fingerprint, first, plan.allow_changes)
        taken = adapt_snapshot(read, self._micro_batcher.consumed_unit)
        self._window.begin(taken.step, taken.window)
        self._fresh()
        self.step = taken.step + taken.window.offset
        pending = self._stream.resume(taken.cursor)
        self._micro_batcher.resume(pending, taken.consumed)
        if pending and taken.consumed_unit is not ConsumedUnit.LOOKAHEAD:
            self._counts_of(pending[0].source).packed += taken.consumed
        return tuple(resume_warnings(read, PackShape(contract.seq_length, contract.segment_multiple), plan.window))
