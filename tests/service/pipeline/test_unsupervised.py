"""Samples, and pieces of them, whose loss mask is all 0: kept, dropped or refused, and all accounted for.

What is right is said by plain lists: a sample's targets, cut to runs, and which of the runs have a 1 in their mask.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import ContractError, SourceError
from packhorse_service.framing import FramedStep
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.piece import Piece
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.mixing.source_counts import SourceCounts
from packhorse_service.mixing.unsupervised import Unsupervised
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from tests.service.corpus import (
    MemoryCorpus,
    Pair,
    consecutive,
    inline_engine,
    make_block,
    make_plan,
    microbatches,
    run_plan,
    write_shard,
)

Masks = list[list[int]]
Run = tuple[int, ...]  # consecutive targets, by their ids: no id comes twice

CUTS = {
    OverLength.SPLIT: lambda run, slots: [run[at : at + slots] for at in range(0, len(run), slots)],
    OverLength.TRUNCATE_LEFT: lambda run, slots: [run[-slots:]],
    OverLength.TRUNCATE_RIGHT: lambda run, slots: [run[:slots]],
    OverLength.DROP: lambda run, slots: [run] if len(run) <= slots else [],
}


def spans_of_masks() -> st.SearchStrategy[list[int]]:
    """Masks as chats have them, a run of prompt and a run of answer in turn; many of them all 0."""
    runs = st.lists(st.tuples(st.sampled_from([0, 0, 1]), st.integers(1, 14)), min_size=1, max_size=4)
    return runs.map(lambda parts: [0] + [bit for bit, length in parts for _ in range(length)])


masks_of_sources = st.lists(st.lists(spans_of_masks(), min_size=1, max_size=8), min_size=1, max_size=3)


def corpus_of(sources: Sequence[Masks], policy: OverLength, unsupervised: Unsupervised) -> MemoryCorpus:
    corpus, first = MemoryCorpus(), 1
    for number, masks in enumerate(sources):
        samples = consecutive([len(mask) for mask in masks], first)
        first += sum(map(len, masks))
        block = make_block(samples, loss_mask=masks)
        corpus.add(
            [[block]], name=str(number), over_length=policy, unsupervised=unsupervised, skip_budget=99, open_shards=1
        )
    return corpus


def runs_of(sources: Sequence[Masks]) -> Iterator[tuple[Run, dict[int, int]]]:
    """Yield the targets of each sample, and of all of them whether it is trained on."""
    flat = [mask for masks in sources for mask in masks]
    for ids, mask in zip(consecutive([len(mask) for mask in flat]), flat, strict=True):
        yield tuple(ids[1:]), dict(zip(ids, mask, strict=True))


def targets_of(piece: Piece) -> Run:
    ids: list[int] = piece.block.tokens[piece.begin : piece.end].tolist()
    return tuple(ids[len(ids) - piece.slots :])


def drawn(stream: SampleStream) -> list[Piece]:
    pieces = list[Piece]()
    while (some := stream.draw()) is not None:
        pieces.extend(some)
    return pieces


@settings(max_examples=60)
@given(sources=masks_of_sources, policy=st.sampled_from(sorted(CUTS)))
def test_what_is_dropped_are_the_pieces_without_a_trained_target_and_nothing_else(
    sources: list[Masks], policy: OverLength
) -> None:
    stream = corpus_of(sources, policy, Unsupervised.DROP).stream(16)
    expected, dropped = list[Run](), list[Run]()
    for run, trained in runs_of(sources):
        for part in CUTS[policy](run, 16):
            (expected if any(trained[target] for target in part) else dropped).append(part)
    assert sorted(map(targets_of, drawn(stream))) == sorted(expected)
    counts = stream.counts.values()
    assert sum(of_source.unsupervised_pieces for of_source in counts) == len(dropped)
    assert sum(of_source.unsupervised_targets for of_source in counts) == sum(map(len, dropped))
    assert sum(of_source.pending for of_source in counts) == sum(map(len, expected))


@settings(max_examples=60)
@given(sources=masks_of_sources, policy=st.sampled_from(sorted(CUTS)))
def test_a_sample_is_refused_for_any_piece_without_a_trained_target(sources: list[Masks], policy: OverLength) -> None:
    stream = corpus_of(sources, policy, Unsupervised.ERROR).stream(16)
    expected, faults, refused = list[Run](), 0, 0
    for run, trained in runs_of(sources):
        parts = CUTS[policy](run, 16)
        if all(any(trained[target] for target in part) for part in parts):
            expected += parts
        else:
            faults, refused = faults + 1, refused + len(run)
    assert sorted(map(targets_of, drawn(stream))) == sorted(expected)
    assert sum(of_source.faults for of_source in stream.counts.values()) == faults
    assert sum(of_source.unsupervised_targets for of_source in stream.counts.values()) == refused
    assert sum(of_source.pending for of_source in stream.counts.values()) == sum(map(len, expected))


@settings(max_examples=80)
@given(
    sources=masks_of_sources,
    policy=st.sampled_from(sorted(CUTS)),
    unsupervised=st.sampled_from(Unsupervised),
    lengths=st.lists(st.sampled_from([7, 16, 23]), min_size=1, max_size=4),
    packed=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_a_stream_resumed_again_and_again_gives_each_trained_target_once(
    sources: list[Masks], policy: OverLength, unsupervised: Unsupervised, lengths: list[int], packed: list[int]
) -> None:
    """At the same length and at others: whatever was packed in between, and however often it was cut."""
    corpus = corpus_of(sources, policy, unsupervised)
    stream, pending, given_out = corpus.stream(lengths[0]), list[Piece](), Counter[int]()
    for length, many in zip([*lengths, lengths[-1]], [*packed, 0][: len(lengths) + 1], strict=False):
        cursor, before = stream.cursor(), [targets_of(piece) for piece in pending]
        at, stream = stream, corpus.stream(length)
        pending = stream.resume(cursor)
        if length == at._lengths[0]:
            assert [targets_of(piece) for piece in pending] == before
        check(stream, pending, unsupervised)
        for _ in range(3):
            pending += stream.draw() or []
        for piece in pending[:many]:
            stream.mark_packed([piece.number], {piece.source: piece.slots})
            given_out.update(targets_of(piece))
        pending = pending[many:]
        check(stream, pending, unsupervised)
    given_out.update(target for piece in [*pending, *drawn(stream)] for target in targets_of(piece))
    assert set(given_out.values()) <= {1}
    wanted = {target for run, trained in runs_of(sources) for target in run if trained[target]}
    if policy is OverLength.SPLIT and unsupervised is not Unsupervised.ERROR:
        assert wanted <= given_out.keys()


def check(stream: SampleStream, pending: Sequence[Piece], unsupervised: Unsupervised) -> None:
    """Assert that the account holds, and that nothing waits which the policy would not have."""
    held = Counter[str]()
    for piece in pending:
        held[str(piece.source)] += piece.slots
        mask = piece.block.loss_mask
        assert mask is not None
        assert unsupervised is Unsupervised.KEEP or mask[piece.end - piece.slots : piece.end].any()
    assert {name: counts.pending for name, counts in stream.counts.items()} == {n: held[n] for n in stream.counts}


# Of the whole path -----------------------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    "packs": {},
    "windows, two ranks": {"packing": {"window": 2}, "layout": {"data": 2}},
    "documents cut by rows": {"contract": {"packing": "concat"}},
    "an endless run": {"contract": {"packing": "concat", "isolate_documents": False}},
    "samples flattened": {"contract": {"packing": "in_batch", "micro_batch_size": 2}},
    "padded rows": {"contract": {"packing": "none"}},
}


def write_masked(base: Path, *, labels: bool = False) -> None:
    """Write shards in which every third sample is trained on nowhere, and the others behind a prompt."""
    first = 1
    for shard in range(3):
        samples = {f"{n:02d}": ids for n, ids in enumerate(consecutive([9 + 13 * (n % 8) for n in range(14)], first))}
        first += sum(map(len, samples.values()))
        masks = {
            key: [int(n % 3 > 0 and i > n) for i in range(len(ids))] for n, (key, ids) in enumerate(samples.items())
        }
        own = {
            key: [id_ + 1 if bit else -100 for id_, bit in zip(ids, masks[key], strict=True)]
            for key, ids in samples.items()
        }
        write_shard(
            base / f"part-{shard}.tar", samples, loss_masks=None if labels else masks, labels=own if labels else None
        )


def masked_plan(base: Path, unsupervised: str, **sections: Any) -> StreamPlan:
    source = {"shards": "part-*.tar", "over_length": "split", "unsupervised": unsupervised, "epochs": 2}
    return make_plan(base, {"docs": source}, keys=True, **sections)


def trained_pairs(steps: Sequence[FramedStep], plan: StreamPlan) -> Counter[Pair]:
    return Counter(
        pair
        for step in steps
        for batch in microbatches(step, plan)
        if not batch.filler
        for pair, bit in zip(
            zip(batch.tokens.ravel().tolist(), batch.labels.ravel().tolist(), strict=True),
            batch.loss_mask.ravel().tolist(),
            strict=True,
        )
        if bit
    )


@pytest.mark.parametrize(
    ("path", "labels"), [*((path, False) for path in PATHS), ("packs", True), ("padded rows", True)]
)
def test_dropping_changes_nothing_that_is_trained_on_and_resumes_exactly(
    tmp_path: Path, path: str, labels: bool
) -> None:
    write_masked(tmp_path, labels=labels)
    kept, dropped = (masked_plan(tmp_path, policy, **PATHS[path]) for policy in ("keep", "drop"))
    pipeline = Pipeline(dropped, inline_engine(dropped))
    whole = list(iter(pipeline.next_step, None))
    counts = pipeline.counts["docs"]
    before, after = trained_pairs(run_plan(kept), kept), trained_pairs(whole, dropped)
    if path != "an endless run":  # where the last id of a document predicts the first of the next that is left
        assert after == before
        assert counts.pending == 0
    assert Counter(label for _, label in after.elements()) == Counter(label for _, label in before.elements())
    assert counts.unsupervised_pieces >= 2 * 3 * 5
    assert counts.packed + counts.unsupervised_targets + counts.pending == counts.targets
    for step in whole:
        assert run_plan(dropped, step.snapshot) == whole[step.step + 1 :]


@pytest.mark.parametrize("length", [32, 48, 128])
def test_dropping_goes_on_at_another_length(tmp_path: Path, length: int) -> None:
    write_masked(tmp_path)
    old, new = (masked_plan(tmp_path, "drop", contract={"seq_length": slots}) for slots in (64, length))
    whole = run_plan(old)
    everything = trained_pairs(whole, old)
    for step in whole:
        pipeline = Pipeline(new, inline_engine(new))
        pipeline.restore(step.snapshot)
        rest = list(iter(pipeline.next_step, None))
        assert trained_pairs(whole[: step.step + 1], old) + trained_pairs(rest, new) == everything
        assert pipeline.counts["docs"].pending == 0


def test_a_sample_refused_is_named_with_its_ids_and_what_to_do(tmp_path: Path) -> None:
    write_masked(tmp_path)
    said = r"shard 'part-\d\.tar', sample '\d+': nothing is trained on in its ids \d+ … \d+: their loss mask is 0; set "
    with pytest.raises(
        SourceError, match=said + r"unsupervised to drop or keep, .* \(source 'docs': skip_budget is 0\)"
    ):
        run_plan(masked_plan(tmp_path, "error"))


def test_a_waiting_piece_that_a_shorter_length_leaves_without_a_trained_target_is_refused(tmp_path: Path) -> None:
    samples = {f"{n:02d}": ids for n, ids in enumerate(consecutive([60] * 40))}
    masks = {key: [int(i > 50) for i in range(60)] for key in samples}
    write_shard(tmp_path / "part-0.tar", samples, loss_masks=masks)
    old, new = (masked_plan(tmp_path, "error", contract={"seq_length": slots}) for slots in (64, 32))
    pipeline = Pipeline(new, inline_engine(new))
    said = (
        r"a sample that waits cannot be used any more: shard 'part-0\.tar', sample '\d+': nothing is trained on in its"
    )
    with pytest.raises(ContractError, match=said + r" ids 0 … 32: "):
        pipeline.restore(run_plan(old, limit=1)[0].snapshot)


def test_what_is_left_as_it_is_changes_no_checkpoint(tmp_path: Path) -> None:
    write_masked(tmp_path)
    kept, dropped = (masked_plan(tmp_path, policy) for policy in ("keep", "drop"))
    default = make_plan(tmp_path, {"docs": {"shards": "part-*.tar", "over_length": "split", "epochs": 2}}, keys=True)
    assert kept.fingerprint == default.fingerprint
    refusal = r"these differ: over_length; .*allow_changes: \[over_length@"
    with pytest.raises(ContractError, match=refusal):
        run_plan(dropped, run_plan(kept, limit=1)[0].snapshot)


def test_chats_without_a_trained_turn_are_dropped_like_ids(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """By every spelling a turn is left out: it is the mask that counts."""
    with tarfile.open(tmp_path / "part-0.tar", "w") as tar:
        for number in range(12):
            said: dict[str, object] = {"role": "assistant", "content": f"answer {number}"}
            if number % 3 == 0:
                said["train"] = False
            turns = [{"role": "user", "content": f"question {number}"}, said]
            content = json.dumps({"messages": turns}).encode()
            member = tarfile.TarInfo(f"{number:02d}.json")
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    contract = {"vocab_size": None, "seq_length": 256}
    source = {"shards": "part-0.tar", "unsupervised": "drop"}
    plan = make_plan(tmp_path, {"chat": source}, tokenizer={"file": str(tiny_tokenizer)}, keys=True, contract=contract)
    pipeline = Pipeline(plan, inline_engine(plan))
    keys = {key for step in iter(pipeline.next_step, None) for mb in microbatches(step, plan) for _, _, key in mb.keys}
    assert keys == {f"{number:02d}" for number in range(12) if number % 3}
    counts: SourceCounts = pipeline.counts["chat"]
    assert (counts.unsupervised_pieces, counts.pending, counts.samples) == (4, 0, 12)
