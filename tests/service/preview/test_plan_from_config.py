"""``packhorse plan feed.yaml``: figures of the stream that would be served, without serving it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ConfigError, SourceError
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.preview.compare import compared
from packhorse_service.preview.from_config import plan_feed
from packhorse_service.preview.from_lengths import LengthsOptions, plan_lengths
from packhorse_service.preview.plan_collector import PlanCollector
from packhorse_service.preview.plan_report import PlanReport
from tests.service.corpus import (
    Corpus,
    damage,
    inline_engine,
    make_config,
    microbatches,
    over_long_source,
    random_lengths,
    run_plan,
    steps_of,
    write_source,
)

MODES: dict[str, dict[str, Any]] = {
    "online": {},
    "aligned": {"segment_multiple": 8, "max_segments": 3},
    "trimmed": {"pad_to_max_length": False, "segment_multiple": 4},
    "in_batch": {"packing": "in_batch", "micro_batch_size": 2, "segment_multiple": 4},
    "concat": {"packing": "concat", "segment_multiple": 4},
    "none": {"packing": "none", "micro_batch_size": 2},
}
ONE_RUN = {"packing": "concat", "isolate_documents": False, "micro_batch_size": 2}


def tallied(base: Path, sources: dict[str, Any], steps: int | None = None, **sections: Any) -> PlanCollector:
    return plan_feed(make_config(sources, **sections), base, "feed.yaml", steps, lambda _steps, _samples: None)


def planned(base: Path, sources: dict[str, Any], steps: int | None = None, **sections: Any) -> PlanReport:
    return tallied(base, sources, steps, **sections).report()


def two_sources(base: Path) -> dict[str, Any]:
    write_source(base / "docs", random_lengths(1, 3, 20, longest=65))
    write_source(base / "chat", random_lengths(2, 2, 20, longest=60), first=20_000, masked=True)
    return {"docs": {"shards": "docs/*.tar", "weight": 3}, "chat": {"shards": "chat/*.tar", "weight": 1}}


# What is served ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_figures_are_those_of_the_micro_batches_that_are_served(tmp_path: Path, mode: dict[str, Any]) -> None:
    sources = two_sources(tmp_path)
    sections: dict[str, Any] = {"contract": mode, "layout": {"data": 2}}
    plan = plan_stream(make_config(sources, **sections), tmp_path)
    report = planned(tmp_path, sources, **sections)
    steps = [microbatches(step, plan) for step in run_plan(plan)]
    assert (report.steps, report.complete) == (len(steps), True)
    for served, found in zip(steps, report.per_step, strict=True):
        real = [batch for batch in served if not batch.filler]
        assert (found.micro_batches, found.fillers) == (len(real), len(served) - len(real))
        assert found.unsupervised == sum(batch.num_loss_tokens == 0 for batch in real)
        assert sum(found.tokens) == sum(batch.num_tokens for batch in real)
        slots = sum(batch.tokens.size for batch in real)
        assert found.useful_fill == round(sum(found.tokens) / slots, 6)
        if plan.contract.packed:
            multiple = plan.contract.segment_multiple
            physical = sum(int((-(-lengths_of(batch) // multiple) * multiple).sum()) for batch in real)
            assert found.slot_fill == round(physical / slots, 6)
    if plan.contract.packed:
        assert report.segments is not None
        counts = [np.count_nonzero(lengths_of(batch)) for batches in steps for batch in batches if not batch.filler]
        assert report.segments.max == max(counts)


def lengths_of(batch: MicroBatch) -> Any:
    return np.diff(batch.cu_seqlens).astype(np.int64)


def test_one_run_of_ids_is_planned_full(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    sections: dict[str, Any] = {"contract": ONE_RUN, "layout": {"data": 2}}
    plan = plan_stream(make_config(sources, **sections), tmp_path)
    report = planned(tmp_path, sources, **sections)
    served = [batch for step in run_plan(plan) for batch in microbatches(step, plan) if not batch.filler]
    assert report.fill.tokens == sum(batch.num_tokens for batch in served)
    assert report.fill.row_slots == sum(batch.tokens.size for batch in served)


@pytest.mark.parametrize("mode", MODES)
def test_what_does_not_apply_to_a_mode_is_left_out(tmp_path: Path, mode: str) -> None:
    report = planned(tmp_path, two_sources(tmp_path), contract=MODES[mode])
    packed, online = report.setting.packing != "none", report.setting.packing == "online"
    assert (report.order is not None) == (report.setting.lookahead is not None) == online
    assert (report.segments is not None) == (report.balance is not None) == packed
    assert (report.over_length is None) == (report.setting.packing == "concat")
    assert (report.fill.packs_at_least is not None) == (report.setting.packing in ("online", "concat"))


def test_a_stream_is_planned_as_its_lengths_alone(tmp_path: Path) -> None:
    """One source in the order of its file."""
    lengths = random_lengths(3, 1, 200, longest=150)
    write_source(tmp_path / "docs", lengths)
    source = {"shards": "docs/*.tar", "shuffle": False, "open_shards": 1, "over_length": "split", "epochs": 2}
    sections: dict[str, Any] = {
        "contract": {"segment_multiple": 4},
        "layout": {"data": 2},
        "packing": {"lookahead": 3, "window": 2},
    }
    options = LengthsOptions(
        origin="feed.yaml",
        seq_length=64,
        data_parallel=2,
        global_batch_size=4,
        segment_multiple=4,
        lookahead=3,
        window=2,
        over_length=OverLength.SPLIT,
        epochs=2,
    )
    of_feed = planned(tmp_path, {"docs": source}, **sections)
    alone = plan_lengths(np.array(lengths[0]) - 1, options, lambda _steps, _samples: None).report()
    assert of_feed.setting.mixed_by == "tokens"
    assert [w.partition(" has ")[2] for w in of_feed.warnings] == [w.partition(" has ")[2] for w in alone.warnings]
    of_feed = replace(of_feed, sources=(), warnings=(), setting=replace(of_feed.setting, mixed_by=None))
    assert of_feed == replace(alone, sources=(), warnings=())


def test_the_comparison_has_the_figures_of_the_plan_itself_at_its_own_length(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    for steps in (None, 5):
        report = compared(tallied(tmp_path, sources, steps))
        (own,) = [each for each in report.comparison or () if each.seq_length == 64]
        assert report.balance is not None
        assert (own.useful_fill, own.slot_fill, own.segments) == (report.fill.useful, report.fill.slot, report.segments)
        assert own.synchronous == report.balance.synchronous.after.mean


# Sources -------------------------------------------------------------------------------------------------


def test_shares_of_sources_add_up_and_follow_their_weights(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    for source in sources.values():
        source["epochs"] = "endless"
    report = planned(tmp_path, sources, steps=20)
    docs, chat = report.sources
    assert (docs.weight, chat.weight) == (0.75, 0.25)
    assert docs.share + chat.share == pytest.approx(1, abs=1e-5)
    assert docs.share == pytest.approx(0.75, abs=0.05)
    assert docs.least <= docs.share <= docs.most
    assert docs.tokens + chat.tokens == report.fill.tokens
    assert docs.epochs > 1
    assert [sum(of_source) for of_source in zip(*(step.tokens for step in report.per_step), strict=True)] == [
        docs.tokens,
        chat.tokens,
    ]


def test_a_stream_without_an_end_needs_a_number_of_steps(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    sources["chat"]["epochs"] = "endless"
    with pytest.raises(ConfigError, match=r"--steps is missing: sources\.chat\.epochs=endless"):
        tallied(tmp_path, sources)
    report = planned(tmp_path, sources, steps=3)
    assert (report.steps, report.complete) == (3, False)


def test_an_endless_source_ends_with_another_where_the_mixture_does(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    sources["chat"]["epochs"] = "endless"
    report = planned(tmp_path, sources, mixing={"on_end": "stop"})
    assert report.complete
    assert report.sources[0].epochs == 1


def test_a_window_of_a_configuration_is_planned_whole(tmp_path: Path) -> None:
    report = planned(tmp_path, two_sources(tmp_path), steps=2, packing={"window": 3})
    assert (report.steps, report.setting.window, report.complete) == (3, 3, False)


def test_micro_batches_that_fill_no_step_are_counted_where_they_are_dropped(tmp_path: Path) -> None:
    sources = two_sources(tmp_path)
    contracts: list[dict[str, Any]] = [{"global_batch_size": 7, "remainder": policy} for policy in ("pad", "drop")]
    padded, dropped = (planned(tmp_path, sources, contract=contract) for contract in contracts)
    assert padded.fillers > 0
    assert (dropped.steps, dropped.fillers) == (padded.steps - 1, 0)
    assert dropped.dropped == padded.per_step[-1].micro_batches


# Over-length ---------------------------------------------------------------------------------------------


def test_the_policy_error_does_not_stop_a_plan_which_says_where_it_would_stop(tmp_path: Path) -> None:
    sources = over_long_source(tmp_path)
    sources["long"]["over_length"] = "error"
    plan = plan_stream(make_config(sources), tmp_path)
    with pytest.raises(SourceError) as refused:
        steps_of(Pipeline(plan, inline_engine(plan)))
    over = planned(tmp_path, sources).over_length
    assert over is not None
    assert over.stop is not None
    assert over.stop.setting == "sources.long.over_length"
    assert str(refused.value).startswith(f"{over.stop.place}: {over.stop.slots} slots are more than")


def test_over_length_within_the_skip_budget_stops_nothing(tmp_path: Path) -> None:
    sources = over_long_source(tmp_path)
    sources["long"] |= {"over_length": "error", "skip_budget": 1000}
    report = planned(tmp_path, sources)
    assert report.over_length is not None
    assert report.over_length.samples > 0
    assert report.over_length.stop is None


@pytest.mark.parametrize("policy", [policy for policy in OverLength if policy is not OverLength.ERROR])
def test_the_cost_of_a_policy_is_what_the_stream_then_counts(tmp_path: Path, policy: OverLength) -> None:
    sources = over_long_source(tmp_path)
    sources["long"]["over_length"] = "error"
    over = planned(tmp_path, sources).over_length
    assert over is not None
    sources["long"]["over_length"] = str(policy)
    plan = plan_stream(make_config(sources), tmp_path)
    pipeline = Pipeline(plan, inline_engine(plan))
    steps_of(pipeline)
    counts = pipeline.counts["long"]
    assert (over.policies[policy].samples, over.policies[policy].tokens_lost) == (
        counts.over_length,
        counts.lost_targets,
    )
    under_policy = planned(tmp_path, sources)
    assert under_policy.sources[0].lost == counts.lost_targets
    assert under_policy.fill.tokens == under_policy.samples.tokens - counts.lost_targets


def test_other_faults_stop_a_plan_as_they_stop_serving_or_are_counted(tmp_path: Path) -> None:
    corpus = Corpus.written(tmp_path)
    damage(corpus.shards["docs"][0], "0003.npy")
    source = {"shards": "docs/part-*.tar"}
    with pytest.raises(SourceError, match=r"part-000\.tar"):
        tallied(tmp_path, {"docs": source})
    report = planned(tmp_path, {"docs": source | {"skip_budget": 1}})
    assert (report.sources[0].skipped, report.over_length and report.over_length.samples) == (1, 0)
