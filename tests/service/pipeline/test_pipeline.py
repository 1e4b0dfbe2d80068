"""The whole data path on real shards: every target once, the same bytes every time, from every snapshot on."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.errors import ContractError, SourceError
from packhorse_service.framing import FramedStep, ViewKey
from packhorse_service.loading.engine import ProcessEngine
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.text.formatting import NAMES_SHOWN
from tests.service.corpus import (
    Corpus,
    Pair,
    Stored,
    damage,
    delivered_pairs,
    inline_engine,
    make_plan,
    make_slow_load,
    microbatches,
    over_long_source,
    pairs_of,
    random_lengths,
    read_shards,
    row_contents,
    rows_by_step,
    run_plan,
    segments_of,
    steps_of,
    stored_pairs,
    write_source,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


def trained_pairs(sample: Stored) -> list[Pair]:
    """The pairs of a sample that are trained on."""
    if sample.labels is not None:
        return [pair for pair in sample.pairs() if pair[1] != -100]
    mask = sample.loss_mask or [1] * len(sample.ids)
    return [pair for pair, trained in zip(sample.pairs(), mask[1:], strict=True) if trained]


def delivered(steps: Sequence[FramedStep], plan: StreamPlan) -> list[MicroBatch]:
    return [batch for step in steps for batch in microbatches(step, plan)]


# Every target, exactly once --------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "four ranks": {"layout": {"data": 4}, "contract": {"global_batch_size": 8}},
    "aligned": {"contract": {"segment_multiple": 8}},
    "whole rows for context parallel ranks": {"layout": {"data": 2, "context": 2}},
    "extended tail": {"contract": {"tail_padding": "extend_last", "segment_multiple": 2}},
    "trimmed": {"contract": {"pad_to_max_length": False, "pack_multiple": 4}},
    "few segments": {"contract": {"max_segments": 2}},
    "short lookahead": {"packing": {"lookahead": 1}},
    "long lookahead": {"packing": {"lookahead": 64}},
    "one shard at a time": {"of_each": {"open_shards": 1}},
    "as stored": {"of_each": {"shuffle": False}},
    "wide rows": {"contract": {"seq_length": 1024}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_target_of_a_finite_stream_is_delivered_exactly_once(corpus: Corpus, shape: str) -> None:
    plan = corpus.plan(**SHAPES[shape])
    steps = run_plan(plan)
    stored = read_shards(corpus.every_shard)
    pairs = Counter(pair for sample in stored for pair in sample.pairs() if pair[1] != -100)
    found = delivered_pairs(steps, plan)
    untrained = Counter(pair[0] for sample in stored for pair in sample.pairs() if pair[1] == -100)
    assert Counter({pair: n for pair, n in found.items() if pair[0] not in untrained}) == pairs
    assert Counter(pair[0] for pair in found.elements() if pair[0] in untrained) == untrained
    assert set(pairs.values()) == {1}


@pytest.mark.parametrize("shape", SHAPES)
def test_exactly_what_a_sample_trains_on_is_trained_on(corpus: Corpus, shape: str) -> None:
    plan = corpus.plan(**SHAPES[shape])
    found = Counter[Pair]()
    for batch in delivered(run_plan(plan), plan):
        trained = batch.loss_mask > 0
        found.update(zip(batch.tokens[trained].tolist(), batch.labels[trained].tolist(), strict=True))
    assert found == Counter(pair for sample in read_shards(corpus.every_shard) for pair in trained_pairs(sample))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_is_well_formed(corpus: Corpus, shape: str) -> None:
    plan = corpus.plan(**SHAPES[shape])
    contract, limit = plan.contract, plan.packing.max_segments
    for batch in delivered(run_plan(plan), plan):
        width = len(batch.tokens)
        assert width == batch.width
        assert width == contract.seq_length if contract.pad_to_max_length else width % contract.row_multiple == 0
        assert width <= contract.seq_length
        assert all(int(length) % contract.segment_multiple == 0 for length in np.diff(batch.cu_seqlens_padded))
        assert limit is None or len(segments_of(batch)) <= limit
        assert batch.num_tokens == sum(len(tokens) for tokens, _ in segments_of(batch))
        assert batch.computed_digest() == batch.row_digest


def test_context_parallel_slices_hold_every_slot_of_their_row_once(corpus: Corpus) -> None:
    cut = corpus.plan(layout={"context": 2}, contract={"partition": "zigzag"})
    whole = corpus.plan(layout={"context": 2})
    for step, of_whole in zip(run_plan(cut), run_plan(whole), strict=True):
        assert [view.body.row_digest for view in step.views_of(ViewKey(0, 0))] == [
            v.body.row_digest for v in of_whole.views_of(ViewKey(0, 0))
        ]
        assert [view.body.row_digest for view in step.views_of(ViewKey(0, 1))] == [
            v.body.row_digest for v in of_whole.views_of(ViewKey(0, 0))
        ]
        assert all(view.body.slots == 32 for views in step.views.values() for view in views)


def test_splitting_over_long_samples_loses_and_repeats_no_target(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, over_long_source(tmp_path))
    assert delivered_pairs(run_plan(plan), plan) == stored_pairs(sorted((tmp_path / "long").iterdir()))


def test_an_over_long_sample_stops_the_stream_by_default(tmp_path: Path) -> None:
    write_source(tmp_path / "long", [[5, 66, 5]])
    with pytest.raises(SourceError, match=r"'part-000\.tar', sample '0001': 65 slots .*seq_length=64"):
        run_plan(make_plan(tmp_path, {"long": {"shards": "long/part-*.tar"}}))


@pytest.mark.parametrize("epochs", [2, 3])
def test_each_epoch_delivers_every_target_again_in_another_order(corpus: Corpus, epochs: int) -> None:
    sources = {"docs": {"shards": "docs/part-*.tar", "epochs": epochs}}
    plan = make_plan(corpus.base, sources, packing={"lookahead": 1}, contract={"global_batch_size": 1})
    steps = run_plan(plan)
    pairs = stored_pairs(corpus.shards["docs"])
    assert delivered_pairs(steps, plan) == Counter(dict.fromkeys(pairs, epochs))
    inputs = [token for batch in delivered(steps, plan) for token, _ in pairs_of(batch)]
    assert inputs[: len(pairs)] != inputs[len(pairs) : 2 * len(pairs)]


def test_what_the_sources_gave_is_counted(corpus: Corpus) -> None:
    pipeline = Pipeline(plan := corpus.plan(), inline_engine(plan))
    steps_of(pipeline)
    for name, paths in corpus.shards.items():
        stored = read_shards(paths)
        counts = pipeline.counts[name]
        assert (counts.samples, counts.ids) == (len(stored), sum(len(sample.ids) for sample in stored))
        assert (counts.over_length, counts.dropped_samples, counts.lost_targets, counts.faults) == (0, 0, 0, 0)


def test_content_that_cannot_be_used_is_skipped_within_the_budget_and_shifts_nothing(tmp_path: Path) -> None:
    paths = write_source(tmp_path / "docs", random_lengths(7, 2, 10, longest=40))
    stored = read_shards(paths)
    damaged = damage(paths[0], "0004.npy")
    sources = {"docs": {"shards": "docs/part-*.tar", "skip_budget": 1}}
    plan = make_plan(tmp_path, sources)
    pipeline = Pipeline(plan, inline_engine(plan))
    found = delivered_pairs(steps_of(pipeline), plan)
    kept = [sample for sample in stored if (sample.shard, sample.key) != (damaged.name, "0004")]
    assert found == Counter(pair for sample in kept for pair in sample.pairs())
    assert pipeline.counts["docs"].faults == 1
    without_budget = make_plan(tmp_path, {"docs": {"shards": "docs/part-*.tar"}})
    with pytest.raises(SourceError, match=r"'part-000\.tar', member '0004\.npy'.*skip_budget is 0"):
        run_plan(without_budget)


# The mixture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "count", "largest"), [("tokens", "ids", 65), ("samples", "samples", 1)])
@pytest.mark.parametrize("window", [1, 2])
def test_each_source_is_within_one_sample_of_its_weight_at_every_step_boundary(
    corpus: Corpus, by: str, count: str, largest: int, window: int
) -> None:
    plan = corpus.plan(of_each={"epochs": "endless"}, mixing={"by": by}, packing={"window": window})
    pipeline = Pipeline(plan, inline_engine(plan))
    for steps in range(1, 30):
        pipeline.next_step()
        drawn = {name: getattr(counts, count) for name, counts in pipeline.counts.items()}
        for name, share in {"docs": 5, "chat": 3, "own": 2}.items():
            assert abs(10 * drawn[name] - share * sum(drawn.values())) <= 10 * largest, steps


def test_the_first_source_that_ends_can_end_the_stream(corpus: Corpus) -> None:
    """All that was drawn until then is delivered."""
    sources = {
        "docs": {"shards": "docs/part-000.tar"},
        "chat": {"shards": "chat/part-*.tar", "epochs": "endless"},
    }
    plan = make_plan(corpus.base, sources, mixing={"on_end": "stop"})
    pipeline = Pipeline(plan, inline_engine(plan))
    found = delivered_pairs(steps_of(pipeline), plan)
    assert {found[pair] for pair in stored_pairs(corpus.shards["docs"][:1])} == {1}
    docs, chat = (pipeline.counts[name] for name in ("docs", "chat"))
    assert found.total() == docs.targets + chat.targets
    assert abs(docs.ids - chat.ids) <= 2 * 65, "both have had their equal shares"


def test_a_source_that_ends_leaves_the_others_going_on(corpus: Corpus) -> None:
    sources = {
        "docs": {"shards": "docs/part-000.tar"},
        "chat": {"shards": "chat/part-*.tar", "epochs": "endless"},
    }
    plan = make_plan(corpus.base, sources)
    steps = run_plan(plan, limit=60)
    assert len(steps) == 60
    found = delivered_pairs(steps, plan)
    assert {found[pair] for pair in stored_pairs(corpus.shards["docs"][:1])} == {1}
    assert min(found[pair] for pair in stored_pairs(corpus.shards["chat"])) > 1


# The same bytes --------------------------------------------------------------------------------------


@pytest.fixture
def workers_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes get this process's search path; pytest's own import mode leaves it alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def test_two_runs_give_the_same_bytes(corpus: Corpus) -> None:
    plan = corpus.plan(layout={"data": 2, "context": 2}, contract={"partition": "zigzag"}, keys=True)
    again = corpus.plan(layout={"data": 2, "context": 2}, contract={"partition": "zigzag"}, keys=True)
    assert run_plan(plan) == run_plan(again)


@pytest.mark.usefixtures("workers_can_import_tests")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_worker_processes_in_any_number_and_pace_give_the_same_bytes(corpus: Corpus, workers: int) -> None:
    plan = corpus.plan(loading={"workers": 0, "block_bytes": 4000}, of_each={"epochs": 2})
    engine = ProcessEngine(workers, partial(make_slow_load, dict(plan.decoding), workers))
    try:
        assert steps_of(Pipeline(plan, engine)) == run_plan(plan)
    finally:
        engine.close()


def test_a_step_can_tell_which_samples_its_rows_were_made_of(corpus: Corpus) -> None:
    """Also of fillers; only the first few of many."""
    plan = corpus.plan(keys=True, layout={"data": 2})
    for step in run_plan(plan):
        for rank, index in product(range(2), range(2)):
            (view,) = step.views_of(ViewKey(rank, 0))[index : index + 1]
            batch = Rebuilder(plan.contract, plan.layout, 0).rebuild(view.body, memoryview(view.payload))
            told = step.provenance(rank, index)
            assert (f"; and {len(batch.keys) - NAMES_SHOWN} more samples" in told) == (len(batch.keys) > NAMES_SHOWN)
            for source, shard, key in batch.keys[:NAMES_SHOWN]:
                assert f"of shard {shard!r} of source {source!r}" in told
                assert repr(key) in told


def test_a_corpus_moved_elsewhere_gives_the_same_bytes(corpus: Corpus, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(corpus.base, moved)
    assert run_plan(Corpus(moved, corpus.shards).plan()) == run_plan(corpus.plan())


def test_seeds_give_different_orders_of_the_same_targets(corpus: Corpus) -> None:
    plans = [corpus.plan(seed=seed) for seed in range(3)]
    runs = [run_plan(plan) for plan in plans]
    firsts = [row_contents(microbatches(run[0], plan)[0]) for run, plan in zip(runs, plans, strict=True)]
    assert len(set(firsts)) == 3
    totals = [delivered_pairs(run, plan) for run, plan in zip(runs, plans, strict=True)]
    assert totals[0] == totals[1] == totals[2]


# Data-parallel sizes ---------------------------------------------------------------------------------


def test_the_packs_of_a_step_do_not_depend_on_the_data_parallel_size(corpus: Corpus) -> None:
    plans = [corpus.plan(layout={"data": data}) for data in (1, 2, 4)]
    steps = [rows_by_step(run_plan(plan), plan) for plan in plans]
    assert steps[0] == steps[1] == steps[2]
    assert len(steps[0]) > 5


@pytest.mark.parametrize("layout", [{"data": 2}, {"data": 4}, {"data": 2, "tensor": 2, "pipeline": 2}])
def test_the_pack_stream_does_not_depend_on_layout_or_batch_size(corpus: Corpus, layout: dict[str, int]) -> None:
    """Packs one by one, against the packs of each step in whatever order they are dealt."""
    one_by_one = corpus.plan(contract={"global_batch_size": 1}, packing={"lookahead": 5})
    dealt = corpus.plan(layout=layout, packing={"lookahead": 5})
    packs = [row_contents(batch) for batch in delivered(run_plan(one_by_one), one_by_one)]
    for number, step in enumerate(run_plan(dealt)):
        rows = [row_contents(batch) for batch in microbatches(step, dealt) if not batch.filler]
        assert Counter(rows) == Counter(packs[4 * number : 4 * number + 4])


@pytest.mark.parametrize("data", [1, 2, 4])
def test_every_rank_gets_the_same_number_of_micro_batches_in_every_step(corpus: Corpus, data: int) -> None:
    plan = corpus.plan(layout={"data": data})
    for step in run_plan(plan):
        assert {len(views) for views in step.views.values()} == {4 // data}
        assert {view.body.step for views in step.views.values() for view in views} == {step.step}
        for views in step.views.values():
            assert [view.body.index for view in views] == list(range(4 // data))


def test_steps_count_from_nought(corpus: Corpus) -> None:
    steps = run_plan(corpus.plan())
    assert [step.step for step in steps] == list(range(len(steps)))


# The last step ---------------------------------------------------------------------------------------


def last_step_sizes(corpus: Corpus) -> Iterator[tuple[StreamPlan, StreamPlan, int]]:
    """Plans that pad and drop, and how many packs the last step has of its eight."""
    for seq_length in (64, 72, 96):
        sections: dict[str, Any] = {"packing": {"lookahead": 4}, "layout": {"data": 2}}
        contract = {"seq_length": seq_length, "global_batch_size": 8}
        padded = corpus.plan(contract=contract, **sections)
        dropped = corpus.plan(contract=contract | {"remainder": "drop"}, **sections)
        real = sum(not batch.filler for batch in delivered(run_plan(padded), padded))
        yield padded, dropped, real % 8


def test_the_last_step_is_filled_with_its_own_rows(corpus: Corpus) -> None:
    remainders = []
    for plan, _, remainder in last_step_sizes(corpus):
        *before, last = run_plan(plan)
        assert not any(batch.filler for batch in delivered(before, plan))
        batches = microbatches(last, plan)
        fillers = [batch for batch in batches if batch.filler]
        assert len(fillers) == -remainder % 8
        assert len(batches) == 8
        rows = [batch.tokens.tobytes() + batch.cu_seqlens.tobytes() for batch in batches if not batch.filler]
        for filler in fillers:
            assert filler.tokens.tobytes() + filler.cu_seqlens.tobytes() in rows
        remainders.append(remainder)
    assert any(remainders)


def test_a_filler_trains_on_nothing_and_says_so(corpus: Corpus) -> None:
    plan = corpus.plan(contract={"global_batch_size": 64}, keys=True)
    batches = microbatches(run_plan(plan)[-1], plan)
    fillers, real = ([b for b in batches if b.filler is filler] for filler in (True, False))
    assert fillers
    for batch in fillers:
        assert not batch.loss_mask.any()
        assert set(batch.labels.tolist()) == {-100}
        assert batch.num_loss_tokens == batch.local_loss_tokens == 0
        assert batch.num_tokens > 0
        assert batch.keys == ()
        assert batch.computed_digest() == batch.row_digest
    assert {batch.step_tokens for batch in batches} == {sum(batch.num_tokens for batch in real)}
    assert {batch.step_loss_tokens for batch in batches} == {sum(int(batch.loss_mask.sum()) for batch in real)}


def test_totals_are_of_the_whole_step_on_every_rank(corpus: Corpus) -> None:
    plan = corpus.plan(layout={"data": 2})
    for step in run_plan(plan):
        batches = microbatches(step, plan)
        assert {b.step_tokens for b in batches} == {sum(len(pairs_of(b)) for b in batches)}
        assert {b.step_loss_tokens for b in batches} == {sum(int(b.loss_mask.sum()) for b in batches)}


def test_a_dropped_remainder_leaves_the_whole_steps_as_they_are(corpus: Corpus) -> None:
    for padded, dropped, remainder in last_step_sizes(corpus):
        whole = run_plan(padded)
        kept = run_plan(dropped)
        assert len(kept) == len(whole) - (remainder > 0)
        assert rows_by_step(kept, dropped) == rows_by_step(whole[: len(kept)], padded)
        assert not any(batch.filler for batch in delivered(kept, dropped))


def test_a_stream_that_has_ended_stays_at_its_end(corpus: Corpus) -> None:
    for remainder in ("pad", "drop"):
        plan = corpus.plan(contract={"remainder": remainder, "global_batch_size": 8})
        pipeline = Pipeline(plan, inline_engine(plan))
        count = len(steps_of(pipeline))
        assert [pipeline.next_step() for _ in range(3)] == [None] * 3
        assert pipeline.step == count


# Keys ------------------------------------------------------------------------------------------------


def test_keys_name_the_source_shard_and_sample_of_each_segment(corpus: Corpus) -> None:
    plan = corpus.plan(keys=True)
    stored = {
        (name, sample.shard, sample.key): sample
        for name, paths in corpus.shards.items()
        for sample in read_shards(paths)
    }
    named = Counter[tuple[str, str, str]]()
    for batch in delivered(run_plan(plan), plan):
        if not batch.filler:
            for key, (tokens, _) in zip(batch.keys, segments_of(batch), strict=True):
                sample = stored[key]
                assert tokens.tolist() == (sample.ids if sample.labels is not None else sample.ids[:-1])
                named[key] += 1
    assert named == Counter(stored.keys())


def test_keys_are_not_sent_unasked(corpus: Corpus) -> None:
    plan = corpus.plan()
    assert {batch.keys for batch in delivered(run_plan(plan), plan)} == {()}


# Plans that cannot work ------------------------------------------------------------------------------


def test_all_broken_rules_are_listed_at_once(corpus: Corpus) -> None:
    with pytest.raises(ContractError) as error:
        corpus.plan(
            layout={"data": 3, "context": 2},
            contract={"seq_length": 65, "segment_multiple": 3, "pad_id": 60_000, "micro_batch_size": 2},
        )
    for rule in ("MBS_ONLINE", "CP_LENGTH", "SEGMENT_ALIGN", "PACK_ALIGN", "GBS_DIVIDES", "DTYPE_RANGE"):
        assert rule in str(error.value)


def test_a_warning_is_no_refusal(corpus: Corpus) -> None:
    plan = corpus.plan(contract={"loss_reduction": "mean"})
    assert [warning.split(":")[0] for warning in plan.warnings] == ["PER_TOKEN_LOSS"]
    assert corpus.plan().warnings == ()
