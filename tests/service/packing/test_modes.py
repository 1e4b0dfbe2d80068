"""Every packing mode, from shards to micro-batches, against what DESIGN says of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse_service.config.serve_config import load_config
from packhorse_service.framing import FramedStep, ViewKey
from packhorse_service.pipeline.plan import make_engine, plan_stream
from packhorse_service.pipeline.run import Pipeline
from tests.service.shards_on_disk import ids_member, write_tar

VOCAB_SIZE = 5000
EOD = 4999


def documents(lengths: Sequence[int]) -> list[list[int]]:
    """Documents whose ids are all different from each other's, each ending in EOD."""
    counter = itertools.count(1)
    return [[*(next(counter) for _ in range(n - 1)), EOD] for n in lengths]


def joined(parts: Iterable[Sequence[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def pipeline(
    folder: Path, contract: dict[str, object], layout: dict[str, int] | None = None, **sections: object
) -> Pipeline:
    """A pipeline over ``folder``'s ``a.tar``, in its own order, loading small blocks."""
    path = folder / "feed.yaml"
    settings_ = {
        "layout": layout or {},
        "contract": {"vocab_size": VOCAB_SIZE, **contract},
        "loading": {"workers": 0, "block_bytes": 3000},
        "sources": {"a": {"shards": "a.tar", "shuffle": False, "open_shards": 1}},
        **sections,
    }
    path.write_text(yaml.safe_dump(settings_))
    config = load_config(path)
    plan = plan_stream(config, folder)
    return Pipeline(plan, make_engine(config, plan))


def save(folder: Path, docs: Sequence[Sequence[int]]) -> None:
    write_tar(folder / "a.tar", [(f"{i:05d}.npy", ids_member(doc)) for i, doc in enumerate(docs)])


def steps(made: Pipeline) -> Iterator[FramedStep]:
    while (step := made.next_step()) is not None:
        yield step


def delivered(made: Pipeline, cut: int = 0) -> list[MicroBatch]:
    """All micro-batches of data-parallel rank 0 …, as one context-parallel rank gets them, step by step."""
    plan = made.plan
    return [
        Rebuilder(plan.contract, plan.layout, cut).rebuild(view.body, memoryview(view.payload))
        for step in steps(made)
        for rank in range(plan.layout.data)
        for view in step.views_of(ViewKey(rank, cut if plan.contract.partition != "whole" else 0))
    ]


def pairs(mbs: Sequence[MicroBatch]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for mb in mbs:
        real = mb.labels != mb.ignore_index
        found.update(zip(mb.tokens[real].tolist(), mb.labels[real].tolist(), strict=True))
    return found


def within_documents(docs: Sequence[Sequence[int]]) -> Counter[tuple[int, int]]:
    return Counter(pair for doc in docs for pair in itertools.pairwise(doc))


LENGTHS = [5, 17, 2, 40, 9, 9, 33, 3, 64, 12, 7, 21, 2, 30]


def test_in_batch_flattens_consecutive_samples_and_trims_the_width(tmp_path: Path) -> None:
    docs = documents([5, 17, 2, 30, 9, 9, 33, 3])
    save(tmp_path, docs)
    mbs = delivered(
        pipeline(
            tmp_path,
            {
                "packing": "in_batch",
                "micro_batch_size": 4,
                "global_batch_size": 4,
                "seq_length": 32,
                "pack_multiple": 8,
            },
        )
    )
    assert [mb.tokens[mb.labels != -100].tolist() for mb in mbs] == [
        joined(doc[:-1] for doc in docs[:4]),
        joined(doc[:-1] for doc in docs[4:]),
    ]
    assert mbs[0].cu_seqlens.tolist() == [0, 4, 20, 21, 50, 50]
    assert mbs[0].cu_seqlens_padded.tolist() == [0, 4, 20, 21, 50, 56]
    assert len(mbs[0].tokens) == 56


def test_in_batch_with_a_short_last_row_has_fewer_segments(tmp_path: Path) -> None:
    docs = documents([5, 6, 7])
    save(tmp_path, docs)
    contract = {"packing": "in_batch", "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 8}
    mbs = delivered(pipeline(tmp_path, contract, {"data": 2}))
    assert sorted(len(mb.cu_seqlens) for mb in mbs) == [2, 3]
    assert pairs(mbs) == within_documents(docs)


def test_isolated_documents_are_cut_at_the_row_and_continue_in_the_next(tmp_path: Path) -> None:
    docs = documents(LENGTHS)
    save(tmp_path, docs)
    contract = {"packing": "concat", "seq_length": 16, "global_batch_size": 2, "segment_multiple": 4}
    mbs = delivered(pipeline(tmp_path, contract))
    assert pairs(mbs) == within_documents(docs)
    full = [mb for mb in mbs if not mb.filler][:-1]
    assert all(mb.cu_seqlens_padded[-1] == 16 and mb.cu_seqlens[-1] > 0 for mb in full)
    assert all(np.diff(mb.cu_seqlens).min() > 0 for mb in full), "no row but the last has a tail"


def test_an_endless_run_is_what_plain_megatron_reads(tmp_path: Path) -> None:
    """Row i has ids iL … iL+L-1 and labels one further on, also across documents; positions 0 … L-1."""
    docs = documents(LENGTHS)
    save(tmp_path, docs)
    contract = {
        "packing": "concat",
        "isolate_documents": False,
        "objective": "pretrain",
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 4,
    }
    stream = np.array(joined(docs))
    mbs = delivered(pipeline(tmp_path, contract))
    row = 0
    for mb in mbs:
        if mb.filler:
            continue
        assert mb.tokens.shape == mb.labels.shape == mb.position_ids.shape == (2, 16)
        assert mb.cu_seqlens is None
        assert mb.position_ids.tolist() == [list(range(16))] * 2
        for tokens, labels in zip(mb.tokens, mb.labels, strict=True):
            n = max(min(16, len(stream) - 1 - 16 * row), 0)
            assert tokens[:n].tolist() == stream[16 * row : 16 * row + n].tolist()
            assert labels[:n].tolist() == stream[16 * row + 1 : 16 * row + 1 + n].tolist()
            assert set(labels[n:].tolist()) <= {-100}
            row += 1
    assert row * 16 >= len(stream) - 1
    assert pairs(mbs) == Counter(itertools.pairwise(stream.tolist()))


def test_none_is_one_padded_sample_a_row(tmp_path: Path) -> None:
    docs = documents([5, 17, 2, 16, 9])
    save(tmp_path, docs)
    contract = {"packing": "none", "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4}
    mbs = delivered(pipeline(tmp_path, contract))
    rows = [row for mb in mbs if not mb.filler for row in mb.tokens.tolist()]
    for doc, row in zip(docs, rows, strict=False):
        assert row == [*doc[:-1], *[0] * (17 - len(doc))]
    assert all(mb.cu_seqlens is None and mb.max_seqlen == 16 for mb in mbs)
    assert pairs(mbs) == within_documents(docs)
    assert [mb.filler for mb in mbs] == [False, False, False, True]


@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("packing", ["none", "endless"])
def test_dense_rows_are_cut_row_by_row(tmp_path: Path, packing: str, partition: str) -> None:
    save(tmp_path, documents([9, 17, 5, 16, 9, 13]))
    contract: dict[str, object] = {
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "partition": partition,
    }
    contract |= {"packing": "none"} if packing == "none" else {"packing": "concat", "isolate_documents": False}
    whole = delivered(pipeline(tmp_path, {**contract, "partition": "whole"}))
    cuts = [delivered(pipeline(tmp_path, contract, {"context": 2}), cut) for cut in range(2)]
    chunk = {
        "zigzag": [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))],
        "contiguous": [list(range(8)), list(range(8, 16))],
    }
    for rank, mbs in enumerate(cuts):
        for mb, row in zip(mbs, whole, strict=True):
            held = chunk[partition][rank]
            assert mb.tokens.tolist() == row.tokens[:, held].tolist()
            assert mb.labels.tolist() == row.labels[:, held].tolist()
            assert mb.position_ids.tolist() == row.position_ids[:, held].tolist()
            assert mb.slots().tolist() == [*held, *(16 + slot for slot in held)]


def test_a_fixed_segment_count_is_never_exceeded_and_fills_its_offsets(tmp_path: Path) -> None:
    docs = documents([3] * 40 + [60, 30])
    save(tmp_path, docs)
    contract: dict[str, object] = {"seq_length": 64, "global_batch_size": 2, "static_shapes": True, "max_segments": 5}
    mbs = delivered(pipeline(tmp_path, contract))
    assert {len(mb.cu_seqlens) for mb in mbs} == {len(mb.cu_seqlens_padded) for mb in mbs} == {5 + 2}
    assert {mb.max_seqlen for mb in mbs} == {64}
    assert {len(mb.tokens) for mb in mbs} == {64}
    for mb in mbs:
        assert np.count_nonzero(np.diff(mb.cu_seqlens)) <= 5
        assert mb.cu_seqlens_padded[-1] == 64
        assert mb.cu_seqlens[-1] == mb.num_tokens
    assert pairs(mbs) == within_documents(docs)


@pytest.mark.parametrize("tail", ["own_segment", "extend_last"])
def test_both_tails_deliver_the_same_targets(tmp_path: Path, tail: str) -> None:
    docs = documents(LENGTHS)
    save(tmp_path, docs)
    mbs = delivered(pipeline(tmp_path, {"seq_length": 64, "global_batch_size": 2, "tail_padding": tail}))
    assert pairs(mbs) == within_documents(docs)
    empty = [np.any(np.diff(mb.cu_seqlens) == 0) for mb in mbs]
    assert any(empty) == (tail == "own_segment")


def test_the_padding_mask_is_true_on_padding_and_only_where_it_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, documents(LENGTHS))
    asked = delivered(pipeline(tmp_path, {"seq_length": 64, "global_batch_size": 2, "padding_mask": True}))
    for mb in asked:
        if not mb.filler:
            assert mb.padding_mask.tolist() == (mb.labels == -100).tolist()
        assert mb.padding_mask.dtype == np.bool_
    assert all(
        mb.padding_mask is None for mb in delivered(pipeline(tmp_path, {"seq_length": 64, "global_batch_size": 2}))
    )


def test_tail_slots_stay_free_behind_the_last_sample(tmp_path: Path) -> None:
    """For a loss that shifts labels itself: the last slot of a row then has no target."""
    docs = documents([9] * 30)
    save(tmp_path, docs)
    contract: dict[str, object] = {"seq_length": 16, "global_batch_size": 1}
    assert any(mb.labels[-1] != -100 for mb in delivered(pipeline(tmp_path, contract)))
    kept = delivered(pipeline(tmp_path, contract, packing={"tail_slots": 1}))
    assert all(mb.labels[-1] == -100 for mb in kept)
    assert pairs(kept) == within_documents(docs)


MODES: list[dict[str, object]] = [
    {"packing": "online"},
    {"packing": "online", "max_segments": 3, "pad_cu_seqlens": True},
    {"packing": "in_batch", "micro_batch_size": 2},
    {"packing": "concat", "segment_multiple": 4},
    {"packing": "concat", "max_segments": 2},
    {"packing": "concat", "isolate_documents": False, "micro_batch_size": 2},
    {"packing": "none", "micro_batch_size": 2},
]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("mode", MODES, ids=str)
@given(lengths=st.lists(st.integers(2, 65), min_size=1, max_size=25))
def test_every_target_is_delivered_once_and_every_snapshot_continues_the_same_stream(
    tmp_path: Path, mode: dict[str, object], lengths: list[int]
) -> None:
    docs = documents(lengths)
    save(tmp_path, docs)
    contract = {"seq_length": 64, "global_batch_size": 2, **mode}
    run = list(steps(pipeline(tmp_path, contract)))
    expected = (
        Counter(itertools.pairwise(joined(docs))) if mode.get("isolate_documents") is False else within_documents(docs)
    )
    made = pipeline(tmp_path, contract)
    assert pairs(delivered(made)) == expected
    for step in run:
        resumed = pipeline(tmp_path, contract)
        resumed.restore(step.snapshot)
        rest = list(steps(resumed))
        assert [s.step for s in rest] == list(range(step.step + 1, len(run)))
        for got, want in zip(rest, run[step.step + 1 :], strict=True):
            assert {key: [v.payload for v in vs] for key, vs in got.views.items()} == {
                key: [v.payload for v in vs] for key, vs in want.views.items()
            }
