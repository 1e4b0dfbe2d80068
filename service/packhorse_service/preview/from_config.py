"""A configuration's stream, run through its pipeline up to the planned steps. No row is built, nothing served."""

from __future__ import annotations

from pathlib import Path

from packhorse.errors import ConfigError
from packhorse_service.config.serve_config import ENDLESS, ServeConfig
from packhorse_service.mixing.order import OnEnd
from packhorse_service.mixing.sample_stream import DrawnSample
from packhorse_service.packing.modes import PackedMicroBatch
from packhorse_service.pipeline.plan import StreamPlan, make_engine, plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.planning.planned_step import PlannedStep
from packhorse_service.preview.from_lengths import Advance
from packhorse_service.preview.plan_collector import PlanCollector
from packhorse_service.preview.planning_facts import PLANNED_AS, MicroBatchFacts, PlannedSource, Planning, StepFacts

__all__ = ["plan_feed"]


def plan_feed(config: ServeConfig, base: Path, origin: str, steps: int | None, advance: Advance) -> PlanCollector:
    """Plan the stream to its end, or for as many steps.

    Raises ``ConfigError`` where it has no end and ``steps`` is ``None``, and what serving it would raise; only
    a sample over length under the policy ``error`` is left out and reported, so that a policy can be chosen.
    """
    _check_end(config, steps)
    plan = plan_stream(_without_stops(config), base)
    engine = make_engine(config, plan)
    try:
        collector = PlanCollector(_planning(config, plan, origin))
        pipeline = Pipeline(plan, engine, _Watching(collector, plan))
        while (planned := pipeline.next_planned_step()) is not None:
            collector.planned(_facts(planned, len(plan.sources)))
            advance(collector.steps, len(collector.samples.lengths))
            if steps is not None and collector.steps >= steps and collector.whole:
                collector.complete = False
                break
        counts = [pipeline.counts[setting.order.name] for setting in plan.sources]
        collector.samples.skipped = [of_source.faults for of_source in counts]
        collector.samples.unsupervised = [of_source.unsupervised_targets for of_source in counts]
        return collector
    finally:
        engine.close()


def _check_end(config: ServeConfig, steps: int | None) -> None:
    endless = [name for name, source in config.sources.items() if source.epochs == ENDLESS]
    stops = config.mixing.on_end is OnEnd.STOP and len(endless) < len(config.sources)
    if endless and steps is None and not stops:
        raise ConfigError(
            f"--steps is missing: sources.{endless[0]}.epochs=endless gives the stream no end; "
            "say how many steps to plan, such as --steps 100"
        )


def _without_stops(config: ServeConfig) -> ServeConfig:
    """Return the configuration with no source that stops the stream at a sample over length."""
    sources = {
        name: source.model_copy(update={"over_length": PLANNED_AS[source.over_length]})
        for name, source in config.sources.items()
    }
    return config.model_copy(update={"sources": sources})


def _planning(config: ServeConfig, plan: StreamPlan, origin: str) -> Planning:
    return Planning(
        origin=origin,
        contract=plan.contract,
        data_parallel=plan.layout.data,
        packing=plan.packing,
        lookahead=config.packing.lookahead,
        hidden_size=config.packing.hidden_size,
        window=config.packing.window,
        mixed_by=config.mixing.by,
        limit=plan.cut_length,
        sources=tuple(
            PlannedSource(
                name, setting.order.weight, source.over_length, source.skip_budget, f"sources.{name}.over_length"
            )
            for (name, source), setting in zip(config.sources.items(), plan.sources, strict=True)
        ),
        warnings=plan.warnings,
    )


class _Watching:
    """Tells a collector what a pipeline does."""

    def __init__(self, collector: PlanCollector, plan: StreamPlan) -> None:
        self._collector, self._plan = collector, plan

    def drawn(self, sample: DrawnSample) -> None:
        shard = self._plan.sources[sample.source].shards[sample.shard].name
        place = f"shard {shard!r}, sample {sample.key!r}"
        self._collector.drawn(sample.source, sample.epoch, sample.slots, sample.pieces, place)

    def packed(self, micro_batch: PackedMicroBatch) -> None:
        self._collector.packed([piece.number for piece in micro_batch.pieces], self._plan.cost.cost(micro_batch.slots))


def _facts(planned: PlannedStep[PackedMicroBatch], sources: int) -> StepFacts:
    facts = []
    for micro_batch, cost, loss_tokens in zip(planned.micro_batches, planned.costs, planned.loss_tokens, strict=True):
        by_source = micro_batch.slots_by_source()
        tokens = [by_source.get(source, 0) for source in range(sources)]
        facts.append(MicroBatchFacts(list(micro_batch.slots), tokens, cost, loss_tokens))
    return StepFacts(facts, planned.ranks)
