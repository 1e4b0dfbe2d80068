"""Of everything a source gave it is known what became of it: nothing is unaccounted for, at any moment."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_service.mixing.order import MixBy, Mixing, OnEnd
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.piece import Piece
from packhorse_service.mixing.source_counts import SourceCounts, describe_counts
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from tests.service.corpus import (
    Corpus,
    MemoryCorpus,
    consecutive,
    damage,
    inline_engine,
    make_block,
    make_plan,
    microbatches,
    random_lengths,
    read_shards,
    run_plan,
    segments_of,
    write_source,
)

Targets = Counter[str]  # by source
LEDGER = {"packed": 700, "lost_targets": 200, "dropped_remainder": 40}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


# Of a stream -----------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    lengths=st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=8), min_size=1, max_size=3),
    policy=st.sampled_from(OverLength),
    mixing=st.builds(Mixing, st.sampled_from(MixBy), st.sampled_from(OnEnd)),
    packed=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_targets_drawn_are_pending_in_pieces_or_lost_after_every_draw(
    lengths: list[list[int]], policy: OverLength, mixing: Mixing, packed: list[bool]
) -> None:
    """Also in a stream that was resumed there: what it drew again is packed, pending or lost."""
    corpus = MemoryCorpus()
    for number, of_source in enumerate(lengths):
        corpus.add([[make_block(consecutive(of_source))]], name=str(number), over_length=policy, skip_budget=99)
    stream, pending = corpus.stream(16, mixing=mixing), dict[int, Piece]()
    for settle in packed:
        pieces = stream.draw()
        pending.update((piece.number, piece) for piece in pieces or [])
        check_pending(stream.counts, pending.values())
        if settle and pending:
            piece = pending.pop(next(iter(pending)))
            stream.mark_packed([piece.number])
            stream.counts[str(piece.source)].packed += piece.slots
            check_pending(stream.counts, pending.values())
        resumed = corpus.stream(16, mixing=mixing)
        again = resumed.resume(stream.cursor())
        check_pending(resumed.counts, again)


def check_pending(counts: Any, pending: Any) -> None:
    held = Counter[str]()
    for piece in pending:
        held[str(piece.source)] += piece.slots
    assert {name: of_source.pending for name, of_source in counts.items()} == {name: held[name] for name in counts}
    for of_source in counts.values():
        assert of_source.samples - of_source.dropped_samples - of_source.faults >= 0


# Of the whole path -----------------------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    "packs": {},
    "windows": {"packing": {"window": 3}},
    "closed lookaheads": {"packing": {"algorithm": "first_fit_decreasing"}},
    "an incomplete step dropped": {"contract": {"remainder": "drop", "global_batch_size": 16}},
    "windows, an incomplete step dropped": {
        "contract": {"remainder": "drop", "global_batch_size": 8},
        "packing": {"window": 2},
    },
    "documents cut by rows": {"contract": {"packing": "concat"}},
    "samples flattened": {"contract": {"packing": "in_batch", "micro_batch_size": 2}},
    "padded rows": {"contract": {"packing": "none"}},
    "by samples, to the first end": {"mixing": {"by": "samples", "on_end": "stop"}},
}


def mixed_plan(base: Path, **sections: Any) -> StreamPlan:
    """Sources of every policy, with samples over length and a member that cannot be read."""
    damage(write_source(base / "split", random_lengths(9, 3, 9, longest=120))[1], "0003.npy")
    sources: dict[str, dict[str, object]] = {
        "split": {"shards": "split/part-*.tar", "over_length": "split", "skip_budget": 2, "epochs": 2},
    }
    policies = ("drop", "truncate_left", "truncate_right", "error")
    for number, policy in enumerate(policies):
        write_source(base / policy, random_lengths(number, 2, 12, longest=300), first=5_000 * (number + 1))
        sources[policy] = {"shards": f"{policy}/part-*.tar", "over_length": policy, "skip_budget": 30}
    return make_plan(base, sources, keys=True, **sections)


def delivered(plan: StreamPlan, pipeline: Pipeline) -> list[Targets]:
    """Targets of each step, by source, counted in what is sent."""
    counted = []
    while (step := pipeline.next_step()) is not None:
        targets = Targets()
        for batch in microbatches(step, plan):
            lengths = [len(tokens) for tokens, _ in segments_of(batch)] if plan.contract.packed else [batch.num_tokens]
            for (source, _, _), length in zip(batch.keys, lengths, strict=not batch.filler):
                targets[source] += length
        counted.append(targets)
    return counted


def pending_of(plan: StreamPlan, snapshot: bytes) -> Targets:
    """Targets that a stream resumed from a snapshot delivers or loses at its end, of what was drawn before."""
    pipeline = Pipeline(plan, inline_engine(plan))
    pipeline.restore(snapshot)
    return Targets({name: counts.pending for name, counts in pipeline.counts.items()})


@pytest.mark.parametrize("path", PATHS)
def test_what_is_packed_is_what_is_delivered_and_nothing_is_pending_at_the_end(tmp_path: Path, path: str) -> None:
    plan = mixed_plan(tmp_path, **PATHS[path])
    pipeline = Pipeline(plan, inline_engine(plan))
    total = sum(delivered(plan, pipeline), Targets())
    assert {name: counts.packed for name, counts in pipeline.counts.items()} == {n: total[n] for n in pipeline.counts}
    assert {counts.pending for counts in pipeline.counts.values()} == {0}
    dropped_remainder = sum(counts.dropped_remainder for counts in pipeline.counts.values())
    assert (dropped_remainder > 0) == ("dropped" in path)
    for name, counts in pipeline.counts.items():
        if path != "documents cut by rows":  # where no sample is over length
            assert (counts.lost_targets > 0) == (name != "split")


@pytest.mark.parametrize("path", PATHS)
def test_a_resumed_stream_accounts_for_what_it_draws_again(tmp_path: Path, path: str) -> None:
    """What was pending before is pending after, by source; and the account closes as before."""
    plan = mixed_plan(tmp_path, **PATHS[path])
    window = plan.window.steps
    live = Pipeline(plan, inline_engine(plan))
    while (step := live.next_step()) is not None:
        resumed = Pipeline(plan, inline_engine(plan))
        resumed.restore(step.snapshot)
        if (step.step + 1) % window == 0 and not any(batch.filler for batch in microbatches(step, plan)):
            assert pending_of(plan, step.snapshot) == Targets({n: c.pending for n, c in live.counts.items()})
        delivered(plan, resumed)
        assert {counts.pending for counts in resumed.counts.values()} == {0}


def test_an_endless_run_accounts_for_every_id_but_the_last(tmp_path: Path) -> None:
    """Documents are joined: each id is an input, and the next document's first one its last target."""
    write_source(tmp_path / "docs", random_lengths(1, 3, 9, longest=150))
    write_source(tmp_path / "web", random_lengths(2, 3, 9, longest=150), first=9_000)
    sources: dict[str, dict[str, object]] = {name: {"shards": f"{name}/part-*.tar"} for name in ("docs", "web")}
    plan = make_plan(tmp_path, sources, contract={"packing": "concat", "isolate_documents": False})
    pipeline = Pipeline(plan, inline_engine(plan))
    inputs = 0
    while (step := pipeline.next_step()) is not None:
        inputs += sum(batch.num_tokens for batch in microbatches(step, plan) if not batch.filler)
        assert sum(counts.packed for counts in pipeline.counts.values()) == inputs
        resumed = pending_of(plan, step.snapshot)
        assert resumed == Targets({name: counts.pending for name, counts in pipeline.counts.items()})
    assert sum(counts.pending for counts in pipeline.counts.values()) == 1
    assert all(counts.targets == counts.ids for counts in pipeline.counts.values())


def test_samples_ids_and_targets_are_those_in_the_shards(corpus: Corpus) -> None:
    plan = corpus.plan(packing={"window": 2})
    pipeline = Pipeline(plan, inline_engine(plan))
    assert run_plan(plan) == list(iter(pipeline.next_step, None))
    for name, paths in corpus.shards.items():
        stored, counts = read_shards(paths), pipeline.counts[name]
        targets = sum(len(sample.pairs()) for sample in stored)
        assert counts == SourceCounts(len(stored), sum(len(sample.ids) for sample in stored), targets, targets)


def test_what_each_policy_loses_is_known_beforehand(tmp_path: Path) -> None:
    """By the lengths in the shards alone."""
    plan = mixed_plan(tmp_path)
    pipeline = Pipeline(plan, inline_engine(plan))
    delivered(plan, pipeline)
    for name in ("drop", "truncate_left", "truncate_right", "error"):
        slots = [len(sample.ids) - 1 for sample in read_shards(sorted((tmp_path / name).iterdir()))]
        long = [n for n in slots if n > 64]
        kept = 64 * len(long) * name.startswith("truncate")
        counts = pipeline.counts[name]
        assert counts.over_length == len(long) > 0
        assert counts.lost_targets == sum(long) - kept
        assert counts.dropped_samples == len(long) * (name == "drop")
        assert counts.faults == len(long) * (name == "error")
        assert (counts.samples, counts.targets) == (len(slots), sum(slots))
    counts = pipeline.counts["split"]
    assert (counts.lost_targets, counts.dropped_samples, counts.faults) == (0, 0, 2)


# Shown -----------------------------------------------------------------------------------------------


def test_the_account_names_the_source_and_every_count() -> None:
    counts = SourceCounts(
        samples=10,
        ids=1010,
        targets=1000,
        over_length=3,
        dropped_samples=2,
        unsupervised_pieces=4,
        unsupervised_targets=20,
        faults=1,
        **LEDGER,
    )
    (line,) = describe_counts({"docs": counts})
    assert line == (
        "source 'docs': 10 samples of 1010 ids; of 1000 targets 700 packed, 200 lost, 20 unsupervised, 40 left over, "
        "40 pending; 3 samples over length, 2 lost, 4 pieces unsupervised, 1 skipped"
    )
