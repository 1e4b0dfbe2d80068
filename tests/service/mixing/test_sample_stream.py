"""Samples come in one order whatever is packed; each place resumes to the same pending pieces and further draws."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import SourceError
from packhorse_service.mixing import replay_log
from packhorse_service.mixing.order import Mixing, OrderCursor, SourceCursor
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.piece import Piece
from packhorse_service.mixing.replay_log import REPLAY_POINT_EVERY, StreamCursor
from packhorse_service.mixing.sample_stream import SampleStream
from tests.service.corpus import MemoryCorpus, Pair, consecutive, make_block

LOSSLESS = [OverLength.ERROR, OverLength.SPLIT]
Drawn = tuple[int, int, str, int, int]  # source, shard, key, first and end id within the sample


def what(piece: Piece) -> Drawn:
    """A piece, without its number: where it is and which ids of its sample it holds."""
    start = int(piece.block.offsets[piece.sample])
    key = piece.block.keys[piece.sample]
    return piece.source, piece.shard, key, piece.begin - start, piece.end - start


def draw_rest(stream: SampleStream) -> list[list[Drawn]]:
    draws = []
    while (pieces := stream.draw()) is not None:
        draws.append([what(piece) for piece in pieces])
    return draws


def pairs_of(piece: Piece) -> list[Pair]:
    block, begin, end = piece.block, piece.begin, piece.end
    ids = block.tokens[begin:end].tolist()
    return list(pairwise(ids) if block.labels is None else zip(ids, block.labels[begin:end].tolist(), strict=True))


def one_shard(samples: Sequence[Sequence[int]], **settings: object) -> MemoryCorpus:
    """A source of one shard of one block, in its order."""
    corpus = MemoryCorpus()
    corpus.add([[make_block(samples)]], shuffle=False, **settings)  # type: ignore[arg-type]
    return corpus


def small_corpus(
    lengths: Sequence[Sequence[Sequence[int]]],
    *,
    over_length: OverLength = OverLength.SPLIT,
    labelled: bool = False,
    epochs: int = 1,
    shuffle: bool = True,
) -> MemoryCorpus:
    """Two sources, the second of one sample; ``lengths`` of the first: shards, blocks, samples."""
    corpus, first = MemoryCorpus(), 1
    shards = []
    for of_shard in lengths:
        blocks = []
        for number, of_block in enumerate(of_shard):
            samples = consecutive(of_block, first)
            first += sum(of_block)
            keys = [f"{number}-{i}" for i in range(len(samples))]
            blocks.append(make_block(samples, keys=keys, labels=samples if labelled else None))
        shards.append(blocks)
    corpus.add(shards, epochs=epochs, over_length=over_length, shuffle=shuffle, weight=2)
    corpus.add([[make_block(consecutive([3], first))]], name="one", epochs=epochs, over_length=over_length)
    return corpus


LENGTHS = st.lists(
    st.lists(st.lists(st.integers(2, 24), min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3
)
POLICIES = st.sampled_from(OverLength).filter(lambda policy: policy is not OverLength.ERROR)


# Order -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(lengths=LENGTHS, policy=POLICIES, seq_length=st.integers(1, 8))
def test_the_order_of_samples_depends_on_neither_seq_length_nor_policy(
    lengths: list[list[list[int]]], policy: OverLength, seq_length: int
) -> None:
    kept = small_corpus(lengths, epochs=2).stream(seq_length=64)
    cut = small_corpus(lengths, over_length=policy, epochs=2).stream(seq_length)
    for whole, pieces in zip(draw_rest(kept), draw_rest(cut), strict=True):
        assert {piece[:3] for piece in pieces} <= {piece[:3] for piece in whole}


def test_blocks_are_shuffled_within_and_each_epoch_differs() -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([[1, 2]] * 30)]], epochs=3)
    keys = [draw[0][2] for draw in draw_rest(corpus.stream())]
    epochs = [tuple(keys[start : start + 30]) for start in (0, 30, 60)]
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == sorted(map(str, range(30))) for epoch in epochs)


def test_without_shuffling_samples_come_as_they_are_stored() -> None:
    draws = draw_rest(one_shard([[1, 2]] * 5).stream())
    assert [draw[0][2] for draw in draws] == ["0", "1", "2", "3", "4"]


def test_the_order_within_a_block_never_changes() -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([[1, 2]] * 8), make_block([[1, 2]] * 4, keys="abcd")]], seed=3)
    assert "".join(draw[0][2] for draw in draw_rest(corpus.stream())) == GOLDEN_ORDER


GOLDEN_ORDER = "03574126cdab"


def test_pieces_are_numbered_as_they_are_drawn() -> None:
    stream = one_shard(consecutive([9, 3, 5]), over_length=OverLength.SPLIT).stream(seq_length=4)
    numbers = []
    while (pieces := stream.draw()) is not None:
        numbers += [piece.number for piece in pieces]
    assert numbers == [0, 1, 2, 3]


def test_a_stream_that_is_restarted_gives_the_same_draws() -> None:
    stream = small_corpus([[[5, 9], [4]], [[7]]], epochs=2).stream(seq_length=6)
    whole = draw_rest(stream)
    stream.restart()
    assert draw_rest(stream) == whole


def test_no_block_is_loaded_twice_in_an_epoch() -> None:
    corpus = small_corpus([[[5, 9], [4]], [[7], [8], [9]], [[3]], [[4]]], epochs=2)
    draw_rest(corpus.stream())
    assert set(Counter(corpus.loads).values()) == {2}


def test_loading_ahead_is_bounded_by_the_open_shards() -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([[1, 2]] * 3, keys=[f"{i}{j}" for j in range(3)]) for i in range(3)] for _ in range(8)])
    stream, opened = corpus.stream(), set[tuple[int, str]]()
    assert len(corpus.loads) == 2
    while (pieces := stream.draw()) is not None:
        opened.update((piece.shard, piece.block.keys[0]) for piece in pieces)
        assert len(corpus.loads) <= len(opened) + 2
    assert len(corpus.loads) == len(opened) == 24


# Over-length samples ---------------------------------------------------------------------------------


@settings(max_examples=100)
@given(lengths=LENGTHS, seq_length=st.integers(1, 30), labelled=st.booleans())
def test_splitting_keeps_every_target_exactly_once(
    lengths: list[list[list[int]]], seq_length: int, labelled: bool
) -> None:
    corpus = small_corpus(lengths, labelled=labelled)
    stream, found = corpus.stream(seq_length), Counter[Pair]()
    while (pieces := stream.draw()) is not None:
        found.update(pair for piece in pieces for pair in pairs_of(piece))
        assert all(1 <= piece.slots <= seq_length for piece in pieces)
        assert all(piece.slots == len(pairs_of(piece)) for piece in pieces)
    total = sum(length for shard in lengths for block in shard for length in block)
    count = sum(len(block) for shard in lengths for block in shard)
    assert set(found.values()) == {1}
    assert len(found) == total - (0 if labelled else count) + 2


CUT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]  # 10 slots


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (OverLength.SPLIT, [[1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [9, 10, 11]]),  # overlapping by one id
        (OverLength.TRUNCATE_RIGHT, [[1, 2, 3, 4, 5]]),
        (OverLength.TRUNCATE_LEFT, [[7, 8, 9, 10, 11]]),
        (OverLength.DROP, []),
    ],
)
def test_what_is_kept_of_a_sample_over_length(policy: OverLength, kept: list[list[int]]) -> None:
    pieces = one_shard([CUT], over_length=policy).stream(seq_length=4).draw()
    assert pieces is not None
    assert [piece.block.tokens[piece.begin : piece.end].tolist() for piece in pieces] == kept
    assert [piece.slots for piece in pieces] == [len(ids) - 1 for ids in kept]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (OverLength.SPLIT, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]),  # every id is a slot: no overlap
        (OverLength.TRUNCATE_RIGHT, [[1, 2, 3, 4]]),
        (OverLength.TRUNCATE_LEFT, [[8, 9, 10, 11]]),
        (OverLength.DROP, []),
    ],
)
def test_what_is_kept_of_a_sample_with_labels_of_its_own(policy: OverLength, kept: list[list[int]]) -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([CUT], labels=[[id_ + 100 for id_ in CUT]])]], over_length=policy)
    pieces = corpus.stream(seq_length=4).draw()
    assert pieces is not None
    assert [[token for token, _ in pairs_of(piece)] for piece in pieces] == kept
    assert [piece.slots for piece in pieces] == [len(ids) for ids in kept]


@pytest.mark.parametrize("policy", OverLength)
def test_a_sample_of_exactly_seq_length_slots_is_not_over_length(policy: OverLength) -> None:
    corpus = one_shard([CUT], over_length=policy)
    assert draw_rest(corpus.stream(seq_length=10)) == [[(0, 0, "0", 0, 11)]]


def test_an_over_long_sample_stops_the_stream_and_names_place_slots_and_remedy() -> None:
    stream = one_shard([[1, 2], CUT]).stream(seq_length=9)
    stream.draw()
    with pytest.raises(SourceError) as error:
        stream.draw()
    for part in ("'docs-0.tar'", "'1'", "10 slots", "seq_length=9", "over_length", "'docs'", "skip_budget"):
        assert part in str(error.value)


def test_an_over_long_sample_counts_against_the_skip_budget() -> None:
    corpus = one_shard([CUT, [1, 2], CUT, [1, 2], CUT], skip_budget=2)
    stream = corpus.stream(seq_length=9)
    assert [len(stream.draw() or []) for _ in range(4)] == [0, 1, 0, 1]
    assert stream.counts["docs"].faults == 2
    with pytest.raises(SourceError, match="skip_budget of 2"):
        stream.draw()


@pytest.mark.parametrize(
    ("policy", "dropped_samples", "kept_slots"),
    [
        (OverLength.SPLIT, 0, 21),
        (OverLength.TRUNCATE_LEFT, 0, 9),
        (OverLength.TRUNCATE_RIGHT, 0, 9),
        (OverLength.DROP, 2, 1),
    ],
)
def test_every_policy_counts_samples_and_tokens(policy: OverLength, dropped_samples: int, kept_slots: int) -> None:
    corpus = one_shard([CUT, [1, 2], CUT], over_length=policy)
    corpus.add([[make_block([[1, 2, 3]])]], name="other")
    stream = corpus.stream(seq_length=4)
    draws = draw_rest(stream)
    counts = stream.counts["docs"]
    assert (counts.samples, counts.ids, counts.over_length) == (3, 24, 2)
    assert counts.dropped_samples == dropped_samples
    assert counts.lost_targets == 21 - kept_slots  # of 21 targets
    assert sum(end - begin - 1 for draw in draws for source, _, _, begin, end in draw if source == 0) == kept_slots
    assert (stream.counts["other"].samples, stream.counts["other"].ids) == (1, 3)


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside a source that gives"])
def test_a_source_that_never_ends_and_gives_nothing_is_an_error(others: int) -> None:
    corpus = one_shard([CUT, CUT], over_length=OverLength.DROP, epochs=None)
    for _ in range(others):
        corpus.add([[make_block([[1, 2, 3]])]], name="other", epochs=None)
    stream = corpus.stream(seq_length=4)
    with pytest.raises(SourceError, match=r"'docs': none of its samples in the whole of epoch 2.*over_length: drop"):
        deque(iter(stream.draw, None), maxlen=0)


def test_a_source_that_gives_one_sample_in_each_epoch_goes_on() -> None:
    stream = one_shard([CUT, [1, 2], CUT, CUT], over_length=OverLength.DROP, epochs=None).stream(seq_length=4)
    assert sum(len(stream.draw() or []) for _ in range(40)) == 10


# Content that cannot be used -------------------------------------------------------------------------


def faulty_corpus(skip_budget: int) -> MemoryCorpus:
    corpus = MemoryCorpus()
    block = make_block([[1, 2], [], [3, 4], [], [5, 6]], faulty={1: "not UTF-8", 3: "not JSON"})
    corpus.add([[block]], shuffle=False, skip_budget=skip_budget)
    return corpus


def test_without_a_skip_budget_the_first_fault_stops_the_stream_with_its_place() -> None:
    stream = faulty_corpus(0).stream()
    stream.draw()
    with pytest.raises(SourceError, match=r"sample 1: not UTF-8 .*'docs'.*skip_budget is 0"):
        stream.draw()


def test_a_skip_budget_of_one_skips_one_fault() -> None:
    stream = faulty_corpus(1).stream()
    assert [len(stream.draw() or []) for _ in range(3)] == [1, 0, 1]
    with pytest.raises(SourceError, match=r"sample 3: not JSON .*skip_budget of 1"):
        stream.draw()


def test_faults_within_the_budget_are_skipped_and_counted() -> None:
    stream = faulty_corpus(2).stream()
    assert [draw[0][2] for draw in draw_rest(stream) if draw] == ["0", "2", "4"]
    assert stream.counts["docs"].faults == 2


def test_each_source_has_a_skip_budget_of_its_own() -> None:
    corpus = faulty_corpus(2)
    corpus.add([[make_block([[]], faulty={0: "damaged"})]], name="other")
    with pytest.raises(SourceError, match=r"damaged .*'other'.*skip_budget is 0"):
        draw_rest(corpus.stream())


def test_a_fault_drawn_again_after_resuming_counts_once_against_the_budget() -> None:
    stream = faulty_corpus(2).stream()
    for _ in range(4):
        stream.draw()  # the first sample stays pending, and both faults behind it
    resumed = faulty_corpus(2).stream()
    assert [what(piece)[2] for piece in resumed.resume(stream.cursor())] == ["0", "2"]
    assert [draw[0][2] for draw in draw_rest(resumed) if draw] == ["4"]


def test_a_skip_budget_that_was_used_up_stays_used_up_after_resuming() -> None:
    stream = faulty_corpus(1).stream()
    stream.mark_packed(piece.number for _ in range(3) for piece in stream.draw() or [])
    cursor = stream.cursor()
    assert cursor.packed.all()
    resumed = faulty_corpus(1).stream()
    assert resumed.resume(cursor) == []
    with pytest.raises(SourceError, match=r"sample 3: not JSON .*skip_budget of 1"):
        resumed.draw()


def test_a_key_that_comes_again_in_another_block_is_refused_with_shard_and_key() -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([[1, 2]], keys=["a"]), make_block([[1, 2]], keys=["b"]), make_block([[1, 2]], keys=["a"])]])
    stream = corpus.stream()
    stream.draw()
    stream.draw()
    with pytest.raises(SourceError, match=r"'docs-0\.tar' of source 'docs': duplicate key 'a'"):
        stream.draw()


def test_shards_and_epochs_may_use_the_same_keys() -> None:
    corpus = MemoryCorpus()
    corpus.add([[make_block([[1, 2]], keys=["a"])], [make_block([[1, 2]], keys=["a"])]], epochs=2)
    assert len(draw_rest(corpus.stream())) == 4


# Resuming --------------------------------------------------------------------------------------------


def saved(cursor: StreamCursor, corpus: MemoryCorpus) -> StreamCursor:
    """A place after its way through bytes."""
    rest, sources = memoryview(cursor.order.encode()), []
    for setting in corpus.settings:
        source, rest = SourceCursor.decode(setting.order, rest)
        sources.append(source)
    return StreamCursor(OrderCursor(sources, Mixing()), list(cursor.cut_lengths), cursor.packed.copy(), cursor.checksum)


@settings(max_examples=120)
@given(
    lengths=LENGTHS,
    policy=st.sampled_from([OverLength.SPLIT, OverLength.DROP, OverLength.TRUNCATE_LEFT]),
    labelled=st.booleans(),
    choices=st.lists(st.integers(-90, 40), max_size=60),
)
def test_a_stream_resumed_at_any_point_has_the_same_pending_pieces_and_further_draws(
    lengths: list[list[list[int]]], policy: OverLength, labelled: bool, choices: list[int]
) -> None:
    """``choices`` interleaves draws (below 0) with packing of some pending piece."""

    def corpus() -> MemoryCorpus:
        return small_corpus(lengths, over_length=policy, labelled=labelled, epochs=2)

    seq_length = 10
    stream, pending, drawn = corpus().stream(seq_length), dict[int, Piece](), 0
    whole = draw_rest(corpus().stream(seq_length))
    check_resumption(stream, pending, corpus, seq_length, whole)
    for choice in choices:
        if choice >= 0 and pending:
            number = sorted(pending)[choice % len(pending)]
            del pending[number]
            stream.mark_packed([number])
        else:
            pending.update((piece.number, piece) for piece in stream.draw() or [])
            drawn += 1
        check_resumption(stream, pending, corpus, seq_length, whole[drawn:])


def check_resumption(
    stream: SampleStream,
    pending: dict[int, Piece],
    corpus: Callable[[], MemoryCorpus],
    seq_length: int,
    rest: list[list[Drawn]],
) -> None:
    data = corpus()
    resumed = data.stream(seq_length)
    again = resumed.resume(saved(stream.cursor(), data))
    assert [what(piece) for piece in again] == [what(pending[number]) for number in sorted(pending)]
    # Draws without pieces right after the last drawn piece may come again: nothing came of them.
    further = draw_rest(resumed)
    assert [draw for draw in further if draw] == [draw for draw in rest if draw]


def test_a_resumed_stream_can_be_resumed_again() -> None:
    def corpus() -> MemoryCorpus:
        return small_corpus([[[5, 9, 23], [4, 4]], [[7, 12]]], epochs=2)

    stream, pending = corpus().stream(6), dict[int, Piece]()
    whole = draw_rest(corpus().stream(6))
    for drawn in range(len(whole)):
        resumed = corpus().stream(6)
        again = {piece.number: piece for piece in resumed.resume(stream.cursor())}
        assert [what(piece) for piece in again.values()] == [what(piece) for piece in pending.values()]
        stream, pending = resumed, again
        pending.update((piece.number, piece) for piece in stream.draw() or [])
        if drawn % 3:
            oldest, *_, newest = [*pending, *pending]
            for number in {oldest, newest}:
                stream.mark_packed([number])
                del pending[number]
    assert draw_rest(stream) == []


def test_draws_without_pieces_move_the_place_on() -> None:
    """Dropped samples at the head of the stream are not drawn again and again."""
    stream = one_shard([CUT] * 300 + [[1, 2]], over_length=OverLength.DROP).stream(seq_length=4)
    for drawn in range(1, 301):
        assert stream.draw() == []
        cursor = stream.cursor()
        since = sum(cut.draws for cut in cursor.cut_lengths)
        assert len(cursor.packed) == 0
        assert since < REPLAY_POINT_EVERY
        assert cursor.order.sources[0].drawn == (drawn - since) * len(CUT)
    assert draw_rest(stream) == [[(0, 0, "300", 0, 2)]]


def test_a_place_holds_one_bit_for_each_piece_since_it() -> None:
    stream = one_shard(consecutive([9, 3, 3, 3]), over_length=OverLength.SPLIT).stream(seq_length=4)
    for _ in range(3):
        stream.draw()
    stream.mark_packed([0])
    assert stream.cursor().packed.tolist() == [1, 0, 0, 0]  # the first sample is in two pieces, one of them packed
    stream.mark_packed([2, 1])
    assert stream.cursor().packed.tolist() == [1, 1, 1, 0]


def test_with_a_mark_after_every_draw_a_place_lies_just_before_the_oldest_pending_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_log, "REPLAY_POINT_EVERY", 1)
    stream = one_shard(consecutive([9, 3, 3, 3]), over_length=OverLength.SPLIT).stream(seq_length=4)
    numbers = [piece.number for _ in range(3) for piece in stream.draw() or []]
    stream.mark_packed(numbers[:3])
    assert stream.cursor().packed.tolist() == [0]
    assert stream.cursor().order.sources[0].drawn == 12
    stream.mark_packed(numbers[3:])
    assert len(stream.cursor().packed) == 0


@settings(max_examples=40)
@given(lag=st.integers(0, 100), lengths=st.lists(st.integers(2, 60), min_size=200, max_size=400))
def test_a_place_lies_not_far_before_the_oldest_pending_piece(lag: int, lengths: list[int]) -> None:
    """However samples are cut, and in whatever order they are packed."""
    stream = one_shard(consecutive(lengths), over_length=OverLength.SPLIT).stream(seq_length=8)
    waiting: list[int] = []
    most = 0  # pieces of one sample
    while (pieces := stream.draw()) is not None:
        waiting += [piece.number for piece in pieces]
        most = max(most, len(pieces))
        stream.mark_packed([waiting.pop(0) for _ in range(len(waiting) - lag)])
        packed = stream.cursor().packed.tolist()
        assert packed.count(0) == len(waiting)
        assert (packed.index(0) if waiting else len(packed)) <= REPLAY_POINT_EVERY + most


def places_from(stream: SampleStream, pending: list[Piece]) -> Iterator[tuple[object, ...]]:
    """Where to resume after each draw, while three pieces wait, not always those drawn last."""
    while (pieces := stream.draw()) is not None:
        pending += pieces
        while len(pending) > 3:
            stream.mark_packed([pending.pop(pending[0].begin % 2).number])
        cursor = stream.cursor()
        yield cursor.order.encode(), tuple(cursor.cut_lengths), cursor.packed.tolist(), cursor.checksum


@pytest.mark.parametrize("every", [1, 3, REPLAY_POINT_EVERY])
def test_places_are_the_same_wherever_a_stream_was_resumed(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Readers compare the snapshots they hold, and some may have theirs from a server that was restarted."""
    monkeypatch.setattr(replay_log, "REPLAY_POINT_EVERY", every)
    corpus = small_corpus([[[5, 9, 30], [4, 17]], [[7, 2]], [[3], [24], [6, 6, 6]]], epochs=3)
    pending: list[Piece] = []
    whole = list(places_from(corpus.stream(seq_length=8), pending))
    for drawn in range(len(whole)):
        stream, pending = corpus.stream(seq_length=8), []
        list(islice(places_from(stream, pending), drawn))
        resumed = corpus.stream(seq_length=8)
        assert list(places_from(resumed, resumed.resume(stream.cursor()))) == whole[drawn:]


def test_a_place_of_a_settled_stream_holds_nothing_pending() -> None:
    stream = small_corpus([[[5, 9], [4]], [[7]]]).stream(seq_length=30)
    numbers = [piece.number for _ in range(3) for piece in stream.draw() or []]
    stream.mark_packed(numbers)
    assert stream.cursor().packed.all()
