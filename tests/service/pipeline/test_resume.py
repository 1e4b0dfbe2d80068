"""A stream made again from any snapshot goes on as if nothing had happened, also on another layout."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ConfigError, ContractError, PackhorseError, ProtocolError
from packhorse_service.framing import FramedStep
from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.decode import BlockLoader
from packhorse_service.loading.engine import InlineEngine
from packhorse_service.mixing import replay_log
from packhorse_service.mixing.open_blocks import OpenBlock, OpenBlocks
from packhorse_service.mixing.order import OpenShard, OrderCursor
from packhorse_service.mixing.piece import Demand, Piece
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.pipeline import plan as plan_module
from packhorse_service.pipeline.plan import StreamPlan, plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.snapshot.codec import decode_snapshot
from tests.service.corpus import (
    Corpus,
    damage,
    delivered_pairs,
    inline_engine,
    make_config,
    make_plan,
    mutated,
    over_long_source,
    random_lengths,
    rows_by_step,
    run_plan,
    steps_of,
    stored_pairs,
    write_source,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


def resumable_plans(corpus: Corpus, base: Path) -> dict[str, StreamPlan]:
    """Streams with all that a place must hold: several sources, epochs, cut samples, dropped and faulty ones."""
    damage(write_source(base / "faulty", random_lengths(9, 3, 9, longest=100), first=30_000)[1], "0003.npy")
    sources = {
        **over_long_source(base),
        "drop": {"shards": "faulty/part-*.tar", "over_length": "drop", "skip_budget": 2, "epochs": 2, "weight": 0.4},
    }
    return {
        "three sources": corpus.plan(of_each={"epochs": 2}),
        "by samples, to the first end": corpus.plan(
            of_each={"epochs": 2}, mixing={"by": "samples", "on_end": "stop"}, packing={"window": 2}
        ),
        "as stored, short lookahead": corpus.plan(of_each={"shuffle": False}, packing={"lookahead": 1}),
        "long lookahead": corpus.plan(packing={"lookahead": 64}),
        "two ranks": corpus.plan(layout={"data": 2, "context": 2}, contract={"partition": "zigzag"}, keys=True),
        "dropped remainder": corpus.plan(contract={"remainder": "drop", "global_batch_size": 3}),
        "split, dropped and faulty": make_plan(base, sources, loading={"workers": 0, "block_bytes": 1000}),
    }


@pytest.mark.parametrize(
    "name",
    [
        "three sources",
        "by samples, to the first end",
        "as stored, short lookahead",
        "long lookahead",
        "two ranks",
        "dropped remainder",
        "split, dropped and faulty",
    ],
)
def test_every_snapshot_goes_on_with_the_same_bytes(corpus: Corpus, tmp_path: Path, name: str) -> None:
    plan = resumable_plans(corpus, tmp_path)[name]
    whole = run_plan(plan)
    assert len(whole) > 4
    for step in whole:
        assert run_plan(plan, step.snapshot) == whole[step.step + 1 :]


def test_a_snapshot_of_a_resumed_stream_resumes_as_well(corpus: Corpus) -> None:
    plan = corpus.plan(packing={"lookahead": 16})
    whole, made = run_plan(plan), list[FramedStep]()
    snapshot = None
    while len(made) < len(whole):
        (step,) = run_plan(plan, snapshot, limit=1)
        snapshot = step.snapshot
        made.append(step)
    assert made == whole


def test_one_pipeline_can_go_back_and_forth(corpus: Corpus) -> None:
    plan = corpus.plan()
    whole = run_plan(plan)
    pipeline = Pipeline(plan, inline_engine(plan))
    for step in random.Random(0).sample(whole, len(whole)):
        pipeline.restore(step.snapshot)
        assert pipeline.step == step.step + 1
        assert steps_of(pipeline, limit=2) == whole[step.step + 1 : step.step + 3]
    pipeline.restore(None)
    assert steps_of(pipeline) == whole


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
def test_a_snapshot_goes_on_at_another_data_parallel_size_with_the_same_rows(
    corpus: Corpus, before: int, after: int
) -> None:
    old, new = (corpus.plan(layout={"data": data}) for data in (before, after))
    whole = run_plan(old)
    expected = rows_by_step(whole, old)
    for step in whole[:: len(whole) // 6]:
        assert rows_by_step(run_plan(new, step.snapshot), new) == expected[step.step + 1 :]


# What it reads ---------------------------------------------------------------------------------------


class CountingEngine(InlineEngine):
    """Remembers which blocks were asked for."""

    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(BlockLoader(plan.decoding).load)
        self.asked: list[BlockRequest] = []

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        self.asked.append(request)
        return super().submit(request)


@pytest.mark.parametrize("packing", [{"lookahead": 1}, {"lookahead": 16}, {"lookahead": 4, "window": 2}], ids=str)
def test_resuming_reads_the_blocks_from_the_oldest_pending_sample_on_and_one_for_each_open_shard(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, packing: dict[str, int]
) -> None:
    """Wherever the stream is: nothing that lies before the oldest pending sample is read again."""
    plan = corpus.plan(
        of_each={"epochs": 5, "open_shards": 2}, packing=packing, loading={"workers": 0, "block_bytes": 3000}
    )
    drawn_from: list[OpenBlock] = []
    open_block, draw = OpenBlocks.open, SampleStream.draw
    opened: dict[int, OpenBlock] = {}  # by the block's identity

    def noted_open(blocks: OpenBlocks, shard: OpenShard) -> OpenBlock:
        reading = open_block(blocks, shard)
        opened[id(reading.block)] = reading
        return reading

    def noted_draw(stream: SampleStream, wanted: Demand) -> list[Piece] | None:
        pieces = draw(stream, wanted)
        drawn_from.extend(opened[id(piece.block)] for piece in pieces or [])  # one of each draw
        return pieces

    monkeypatch.setattr(OpenBlocks, "open", noted_open)
    monkeypatch.setattr(SampleStream, "draw", noted_draw)
    pipeline = Pipeline(plan, inline_engine(plan))
    draws_at = {}  # step -> draws in all, where windows meet
    whole = []
    while (step := pipeline.next_step()) is not None:
        whole.append(step)
        draws_at[step.step] = len(drawn_from)
    history, first = list(drawn_from), OrderCursor.at_start((source.order for source in plan.sources), plan.mixing)
    open_shards = sum(min(source.order.open_shards, source.order.shards) for source in plan.sources)
    for step in whole:
        if (step.step + 1) % plan.window.steps:
            continue
        cursor = decode_snapshot(step.snapshot, plan.fingerprint, first).cursor
        since = sum(cut.draws for cut in cursor.cut_lengths)
        readings = {id(reading): reading for reading in history[draws_at[step.step] - since : draws_at[step.step]]}
        between = Counter(reading.request for reading in readings.values())
        engine = CountingEngine(plan)
        resumed = Pipeline(plan, engine)
        engine.asked.clear()
        resumed.restore(step.snapshot)
        assert (Counter(engine.asked) - between).total() <= open_shards


# Another shape ---------------------------------------------------------------------------------------

ANOTHER_SHAPE: dict[str, dict[str, Any]] = {
    "segment_multiple": {"contract": {"segment_multiple": 4}},
    "global_batch_size": {"contract": {"global_batch_size": 8}},
    "lookahead": {"packing": {"lookahead": 30}},
    "max_segments": {"contract": {"max_segments": 2}},
    "window": {"packing": {"window": 3}},
}


@pytest.mark.parametrize("change", ANOTHER_SHAPE)
def test_a_snapshot_goes_on_in_another_shape_with_every_target_once(tmp_path: Path, change: str) -> None:
    """Packs differ from there on; a pending piece of a cut sample is a range of ids, cut again if need be."""
    sources = over_long_source(tmp_path)
    old, new = make_plan(tmp_path, sources), make_plan(tmp_path, sources, **ANOTHER_SHAPE[change])
    whole = run_plan(old)
    pairs = stored_pairs(sorted((tmp_path / "long").iterdir()))
    for step in whole[:: len(whole) // 6]:
        before = delivered_pairs(whole[: step.step + 1], old)
        assert before + delivered_pairs(run_plan(new, step.snapshot), new) == pairs


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"seed": 1}, "order"),
        ({"of_each": {"weight": 1}}, "mixture"),
        ({"of_each": {"epochs": 2}}, "mixture"),
        ({"mixing": {"by": "samples"}}, "mixture"),
        ({"mixing": {"on_end": "stop"}}, "mixture"),
        ({"loading": {"workers": 0, "block_bytes": 999}}, "blocks"),
        ({"tokenizer": "tokenizer.json"}, "tokenizer"),
    ],
)
def test_a_snapshot_of_other_settings_is_refused_with_the_part_that_differs(
    corpus: Corpus, tiny_tokenizer: Path, change: dict[str, Any], part: str
) -> None:
    if "tokenizer" in change:
        change = {"tokenizer": str(tiny_tokenizer)}
    snapshot = run_plan(corpus.plan(), limit=2)[-1].snapshot
    other = corpus.plan(**change)
    with pytest.raises(ContractError, match=rf"these differ: {part};"):
        Pipeline(other, inline_engine(other)).restore(snapshot)


def test_a_snapshot_of_other_data_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    snapshot = run_plan(corpus.plan(), limit=2)[-1].snapshot
    shutil.copytree(corpus.base, tmp_path / "other")
    write_source(tmp_path / "other" / "docs", [[2] * 200])
    other = Corpus(tmp_path / "other", corpus.shards).plan()
    with pytest.raises(ContractError, match="these differ: manifest"):
        Pipeline(other, inline_engine(other)).restore(snapshot)


@pytest.mark.parametrize(("block_bytes", "by"), [(9000, "place"), (1, "drawn since")])
def test_a_shard_that_was_written_anew_under_the_same_name_and_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, by: str
) -> None:
    """Wherever a block of it is half drawn, or samples of it were drawn since: a checksum of each tells.

    As in a store, of which nothing is read at the start.
    """
    monkeypatch.setattr(plan_module, "with_content", tuple)
    monkeypatch.setattr(replay_log, "REPLAY_POINT_EVERY", 1)
    sources: dict[str, dict[str, object]] = {"docs": {"shards": "docs/part-*.tar", "shuffle": False}}
    write_source(tmp_path / "docs", [[30] * 60])
    plan = make_plan(tmp_path, sources, loading={"workers": 0, "block_bytes": block_bytes})
    whole = run_plan(plan)
    write_source(tmp_path / "docs", [[30] * 60], first=2)
    again = make_plan(tmp_path, sources, loading={"workers": 0, "block_bytes": block_bytes})
    assert again.fingerprint == plan.fingerprint
    first, told = OrderCursor.at_start((source.order for source in plan.sources), plan.mixing), Counter[str]()
    for step in whole:
        cursor = decode_snapshot(step.snapshot, plan.fingerprint, first).cursor
        half_drawn = any(at.index for source in cursor.order.sources for at in source.open)
        if half_drawn or len(cursor.packed):
            with pytest.raises(ProtocolError) as error:
                run_plan(again, step.snapshot)
            told["place" if "'part-000.tar' holds other samples at byte" in str(error.value) else "drawn since"] += 1
    assert told[by] == told.total() >= len(whole) - 1


def test_a_refused_snapshot_leaves_the_pipeline_where_it_was(corpus: Corpus) -> None:
    plan = corpus.plan()
    whole = run_plan(plan)
    pipeline = Pipeline(plan, inline_engine(plan))
    assert steps_of(pipeline, limit=3) == whole[:3]
    for bad in (b"", whole[1].snapshot[:-1], run_plan(corpus.plan(seed=1), limit=1)[0].snapshot):
        with pytest.raises((ProtocolError, ContractError)):
            pipeline.restore(bad)
    assert steps_of(pipeline) == whole[3:]


def mutations(corpus: Corpus) -> Iterator[tuple[Pipeline, bytes]]:
    """Snapshots of real steps with a few bytes changed behind the fingerprint, where nothing else would catch it."""
    plan = corpus.plan()
    pipeline = Pipeline(plan, inline_engine(plan))
    mutate, snapshots = random.Random(2), [step.snapshot for step in run_plan(plan)]
    head = 70 + len(plan.fingerprint.encoded_parts())
    for number in range(400):
        snapshot = snapshots[number % len(snapshots)]
        yield pipeline, snapshot[:head] + mutated(snapshot[head:], mutate)


def test_mutated_snapshots_are_restored_or_refused_as_such(corpus: Corpus) -> None:
    """A snapshot is input from a stranger: what does not fit the shards is the sender's fault, not the data's."""
    refused = 0
    for pipeline, snapshot in mutations(corpus):
        try:
            pipeline.restore(snapshot)
        except (ProtocolError, ContractError):
            refused += 1
    assert 0 < refused < 400


def test_mutated_snapshots_that_are_restored_make_steps_or_say_what_is_wrong(corpus: Corpus) -> None:
    went_on = 0
    for pipeline, snapshot in mutations(corpus):
        try:
            pipeline.restore(snapshot)
            pipeline.next_step()
        except PackhorseError:
            continue
        went_on += 1
    assert 0 < went_on < 400, "both outcomes were tried"


def test_snapshots_are_small(corpus: Corpus) -> None:
    for step in run_plan(corpus.plan(packing={"lookahead": 64})):
        assert len(step.snapshot) < 1024


def test_a_plan_whose_snapshots_could_be_over_the_limit_is_refused(tmp_path: Path) -> None:
    """43 sources with 64 open shards each have 2,752 places of 28 bytes: more than 64 KiB."""
    write_source(tmp_path / "docs", [[2]] * 64)
    sources = {f"source {i}": {"shards": "docs/part-*.tar", "open_shards": 64} for i in range(43)}
    with pytest.raises((ConfigError, ContractError), match="open_shards"):
        plan_stream(make_config(sources), tmp_path)
