"""Description of a stream: all that decides its bytes, from the configuration. ``Pipeline`` runs it (``run``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from packhorse.contract.batch_contract import BatchContract, Packing, ResolvedContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ConfigError, ContractError, SourceError
from packhorse.rules import RuleInput, Severity, check
from packhorse.wire.limits import SNAPSHOT_LIMIT_BYTES
from packhorse_service.config.serve_config import ENDLESS, TRAIN, ServeConfig, SourceConfig
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.engine import Engine, InlineEngine, Load, ProcessEngine
from packhorse_service.loading.model_folder import ModelFolder
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from packhorse_service.mixing.open_blocks import SourcePlan, compressed_shard_warnings
from packhorse_service.mixing.order import Mixing, SourceOrderPlan, integer_weights
from packhorse_service.packing.packer import packing_plan
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.pipeline.config_fingerprint import fingerprint_config
from packhorse_service.planning.balance import CostModel
from packhorse_service.planning.balance_window import WindowPlan, plan_window
from packhorse_service.snapshot.codec import (
    snapshot_bound,
)
from packhorse_service.snapshot.fingerprint import StreamFingerprint
from packhorse_service.sources.content import same_content, with_content
from packhorse_service.sources.shards import expand_shards

__all__ = ["StreamPlan", "make_engine", "open_tokenizer", "plan_stream", "resolve_contract"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Plan of one stream: all that decides its bytes."""

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

    @property
    def cut_length(self) -> int | None:
        """Slots at which an over-long sample is cut; none where documents are cut to the rows they fall into."""
        lengths = {Packing.CONCAT: None, Packing.ONLINE: self.packing.capacity_slots(self.contract.segment_multiple)}
        return lengths.get(self.contract.packing, self.contract.seq_length)


def plan_stream(config: ServeConfig, base: Path, name: str = TRAIN) -> StreamPlan:
    """Describe one stream of a configuration whose paths are relative to ``base``.

    Raises ``ConfigError``, ``SourceError`` (shards) or ``ContractError`` (all broken rules at once).
    """
    config = config.of_stream(name)
    layout, declared = config.layout, config.contract
    spec, tokenizer = open_tokenizer(config, base)
    of_model = None if config.tokenizer is None else ModelFolder(base / config.tokenizer.file).chat_template
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
            chat_template=_template(source, source_name, base, of_model),
            date=config.date,
            vocab_size=contract.vocab_size,
            ignore_fields=frozenset(source.ignore_fields),
            ignore_members=frozenset(source.ignore_members),
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
        window=plan_window(config.packing.window, contract, packing, cost, config.seed),
        fingerprint=fingerprint_config(config, tokenizer, settings, decoding, packing, cost, contract, layout),
        allow_changes=frozenset(config.resume.allow_changes),
        warnings=(
            *map(str, broken),
            *compressed_shard_warnings(settings),
            *same_content({setting.order.name: setting.shards for setting in settings}),
        ),
        with_keys=config.keys,
        passes=name != TRAIN,
    )


def open_tokenizer(config: ServeConfig, base: Path) -> tuple[TokenizerSpec | None, Tokenizer | None]:
    """Open the tokenizer of a configuration; return with it what a loader needs to open it too."""
    named = config.tokenizer
    if named is None:
        return None, None
    folder = ModelFolder(base / named.file)
    set_here = {name: value for name, value in named.model_dump().items() if value is not None}
    spec = TokenizerSpec(**{**folder.tokens, **set_here, "file": str(folder.file)})
    tokenizer = Tokenizer(spec)
    # Whoever opens the file later, a loader that replaces one that died, must find what was found here.
    return replace(spec, digest=tokenizer.digest), tokenizer


def resolve_contract(declared: BatchContract, layout: ParallelLayout, tokenizer: Tokenizer | None) -> ResolvedContract:
    """Resolve the contract as it is served. Raises ``ConfigError`` that names what it lacks, or what contradicts it."""
    if declared.vocab_size is not None and tokenizer is not None:
        tokenizer.require_vocabulary(declared.vocab_size)
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


def _template(source: SourceConfig, name: str, base: Path, of_model: str | None) -> str | None:
    """Return the template of a source: its own, or that ``of_model``, the tokenizer's folder."""
    if source.chat_template is None:
        return of_model
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
        shards = with_content(expand_shards(source.shards, base))
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
    return SourcePlan(
        order=order,
        shards=shards,
        over_length=source.over_length,
        skip_budget=source.skip_budget,
        unsupervised=source.unsupervised,
    )


def make_engine(config: ServeConfig, plan: StreamPlan) -> Engine:
    """Make the loading engine of a configuration."""
    make_loader = partial(_make_load, dict(plan.decoding))
    # Built here too: a template that does not compile is told better than by a worker that cannot start.
    load = make_loader()
    return ProcessEngine(config.loading.workers, make_loader) if config.loading.workers else InlineEngine(load)


def _make_load(specs: Mapping[str, DecodingSpec]) -> Load:
    return BlockLoader(specs).load
