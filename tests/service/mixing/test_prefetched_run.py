"""Samples drawn in runs are those drawn one by one: the same pieces, places and counts, however much is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_service.mixing import replay_log
from packhorse_service.mixing.order import MixBy, Mixing
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.piece import Demand, Piece
from packhorse_service.mixing.sample_stream import DrawnSample, SampleStream
from tests.service.corpus import MemoryCorpus, consecutive, make_block

SEQ_LENGTH = 12

BLOCKS = st.lists(st.integers(2, 16), min_size=1, max_size=9)  # lengths of samples, some over SEQ_LENGTH
SHARDS = st.lists(st.lists(BLOCKS, min_size=1, max_size=3), min_size=1, max_size=4)
DEMANDS = st.builds(Demand, st.integers(1, 40), st.integers(1, 90), st.sampled_from([1, 4]))


@dataclass(frozen=True)
class Source:
    """One that the streams below read: lengths of its samples, and how they are read."""

    shards: list[list[list[int]]]
    open_shards: int
    epochs: int
    over_length: OverLength
    faulty: bool  # whether the first sample of each shard is

    def add_to(self, corpus: MemoryCorpus, name: str) -> None:
        blocks = [
            [
                make_block(
                    consecutive(lengths),
                    keys=[f"{number}-{i}" for i in range(len(lengths))],
                    faulty={0: "made so"} if self.faulty and not number else None,
                )
                for number, lengths in enumerate(shard)
            ]
            for shard in self.shards
        ]
        corpus.add(
            blocks,
            name=name,
            open_shards=self.open_shards,
            epochs=self.epochs,
            over_length=self.over_length,
            skip_budget=1000,
        )


SOURCES = st.lists(
    st.builds(Source, SHARDS, st.integers(1, 3), st.integers(1, 2), st.sampled_from(OverLength), st.booleans()),
    min_size=1,
    max_size=2,
)


def stream_of(sources: Sequence[Source], mixing: Mixing) -> SampleStream:
    corpus = MemoryCorpus()
    for number, source in enumerate(sources):
        source.add_to(corpus, f"source-{number}")
    return corpus.stream(SEQ_LENGTH, mixing=mixing)


class Single:
    """A stream that draws one by one, because somebody watches."""

    def __init__(self, sources: Sequence[Source], mixing: Mixing) -> None:
        self.stream = stream_of(sources, mixing)
        self.stream.on_drawn = self._told

    def _told(self, _sample: DrawnSample) -> None:
        """Each sample that is not skipped is told of: none is passed over in a run."""

    def draw_like(self, other: SampleStream) -> list[Piece]:
        """Until as many samples were drawn as from the other."""
        pieces: list[Piece] = []
        while samples_of(self.stream) < samples_of(other):
            pieces += self.stream.draw() or []
        return pieces


def samples_of(stream: SampleStream) -> int:
    return sum(counts.samples for counts in stream.counts.values())


def named(pieces: Sequence[Piece]) -> list[tuple[object, ...]]:
    """Pieces without their blocks, which compare by arrays."""
    return [(p.number, p.source, p.shard, p.block.keys[p.sample], p.begin, p.end, p.slots) for p in pieces]


def stands(stream: SampleStream) -> tuple[object, ...]:
    """Where a stream stands: all that a snapshot and an account say."""
    cursor = stream.cursor()
    return (
        cursor.order.encode(),
        list(cursor.cut_lengths),
        cursor.packed.tolist(),
        cursor.checksum,
        stream.counts,
        stream.at_snapshot_limit,
    )


@settings(max_examples=150)
@given(
    sources=SOURCES,
    by=st.sampled_from(MixBy),
    mark_every=st.integers(1, 12),
    wants=st.lists(DEMANDS, min_size=1, max_size=8),
    settle_every=st.integers(1, 4),
)
def test_runs_give_what_single_draws_give(
    sources: list[Source], by: MixBy, mark_every: int, wants: list[Demand], settle_every: int
) -> None:
    with patch.object(replay_log, "REPLAY_POINT_EVERY", mark_every):
        stream, single = stream_of(sources, Mixing(by)), Single(sources, Mixing(by))
        turn = 0
        while (pieces := stream.draw(wants[turn % len(wants)])) is not None:
            assert named(pieces) == named(single.draw_like(stream))
            assert stands(stream) == stands(single.stream)
            packed = [piece.number for piece in pieces if piece.number % settle_every == 0]
            stream.mark_packed(packed)
            single.stream.mark_packed(packed)
            turn += 1
        assert single.stream.draw() is None
        assert stands(stream) == stands(single.stream)


@settings(max_examples=60)
@given(sources=SOURCES, wants=st.lists(DEMANDS, min_size=1, max_size=12))
def test_a_stream_that_stands_inside_a_run_resumes_there(sources: list[Source], wants: list[Demand]) -> None:
    stream = stream_of(sources, Mixing())
    pending = [piece for wanted in wants for piece in stream.draw(wanted) or []]
    resumed = stream_of(sources, Mixing())
    assert named(resumed.resume(stream.cursor())) == named(pending)
    assert rest_of(resumed) == rest_of(stream)


def rest_of(stream: SampleStream) -> list[tuple[object, ...]]:
    pieces: list[Piece] = []
    while (drawn := stream.draw()) is not None:
        pieces += drawn
    return named(pieces)


def test_no_more_is_drawn_than_was_wanted() -> None:
    source = Source([[[5] * 40]], 1, 1, OverLength.ERROR, faulty=False)
    stream = stream_of([source], Mixing())
    drawn = [len(stream.draw(wanted) or []) for wanted in FIRST_AND_THEN]
    assert drawn == [1, 3, 2, 1, 3]  # the first of a block is drawn alone


def test_sources_that_alternate_give_all_that_is_wanted_and_no_more() -> None:
    source = Source([[[5] * 40]], 1, 1, OverLength.ERROR, faulty=False)
    stream = stream_of([source, source], Mixing())
    drawn = [stream.draw(wanted) or [] for wanted in FIRST_AND_THEN]
    assert list(map(len, drawn)) == [9, 3, 2, 1, 3]
    assert {piece.source for piece in drawn[0]} == {0, 1}


FIRST_AND_THEN = [Demand(pieces=9), Demand(pieces=3), Demand(units=8), Demand(units=1), Demand(units=9)]


@pytest.mark.parametrize(("units", "samples"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_what_is_wanted_counts_in_units(units: int, samples: int) -> None:
    """Five slots are two units of four."""
    stream = stream_of([Source([[[6] * 40]], 1, 1, OverLength.ERROR, faulty=False)], Mixing())
    stream.draw()
    assert len(stream.draw(Demand(units=units, multiple=4)) or []) == samples
