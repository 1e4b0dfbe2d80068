"""A pack becomes a row slot by slot as the design says; the oracle here fills one slot after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.contract.batch_contract import BatchContract, ResolvedContract, TailPadding, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ContractError
from packhorse.rows.row import Row
from packhorse_service.mixing.piece import Piece
from tests.service.corpus import build_row, make_block

PAD, IGNORE = 7, -100


def _build(pieces: Sequence[Piece], contract: ResolvedContract) -> Row:
    """A row whose segments are one piece each."""
    return build_row([(piece,) for piece in pieces], contract)


@dataclass
class Oracle:
    """A row written one slot at a time."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    cu_seqlens_padded: list[int] = field(default_factory=lambda: [0])

    def slot(self, token: int, label: int, mask: int, position: int) -> None:
        self.tokens.append(token)
        self.labels.append(label)
        self.loss_mask.append(mask)
        self.position_ids.append(position)

    def padding(self, count: int, position: int) -> None:
        for i in range(count):
            self.slot(PAD, IGNORE, 0, position + i)

    def close_segment(self, logical: int) -> None:
        self.cu_seqlens.append(self.cu_seqlens[-1] + logical)
        self.cu_seqlens_padded.append(len(self.tokens))


@dataclass(frozen=True)
class SampleOf:
    """A sample and the range of it that is a piece."""

    ids: list[int]
    mask: list[int] | None
    labels: list[int] | None
    begin: int
    end: int

    def piece(self, number: int) -> Piece:
        """The piece, of a block in which another sample comes first."""
        before = [1, 2, 3]
        block = make_block(
            [before, self.ids],
            labels=None if self.labels is None else [before, self.labels],
            loss_mask=None if self.mask is None else [[0, 0, 0], self.mask],
        )
        overlap = 1 if self.labels is None else 0
        return Piece(number, 0, 0, block, 1, 3 + self.begin, 3 + self.end, self.end - self.begin - overlap)

    def slots(self) -> list[tuple[int, int, int]]:
        """(token, label, mask) of each slot: design, "From ids to slots"."""
        mask = self.mask or [1] * len(self.ids)
        if self.labels is not None:
            return [(self.ids[i], self.labels[i], mask[i]) for i in range(self.begin, self.end)]
        return [(self.ids[i], self.ids[i + 1], mask[i + 1]) for i in range(self.begin, self.end - 1)]


def oracle_row(samples: list[SampleOf], contract: ResolvedContract) -> Oracle:
    row = Oracle()
    for sample in samples:
        slots = sample.slots()
        for position, (token, label, mask) in enumerate(slots):
            row.slot(token, label, mask, position)
        row.padding(-len(slots) % contract.segment_multiple, len(slots))
        row.close_segment(len(slots))
    width = contract.seq_length
    if not contract.pad_to_max_length:
        unit = math.lcm(contract.segment_multiple, contract.pack_multiple)
        width = math.ceil(len(row.tokens) / unit) * unit
    tail = width - len(row.tokens)
    if tail and contract.tail_padding is TailPadding.OWN_SEGMENT:
        row.padding(tail, 0)
        row.close_segment(0)
    elif tail:
        row.padding(tail, row.position_ids[-1] + 1)
        row.cu_seqlens_padded[-1] = width
    while contract.pad_cu_seqlens and len(row.cu_seqlens) < (contract.max_segments or 0) + 2:
        row.close_segment(0)
    return row


def contract_of(seq_length: int = 64, **declared: object) -> ResolvedContract:
    settings = {"pad_id": PAD, "ignore_index": IGNORE} | declared
    contract = BatchContract(**settings)  # type: ignore[arg-type]
    return resolve(contract, ParallelLayout(), seq_length=seq_length, global_batch_size=1, vocab_size=1000)


@st.composite
def samples(draw: st.DrawFn, longest: int, labelled: bool) -> SampleOf:
    least = 1 if labelled else 2
    ids = draw(st.lists(st.integers(10, 999), min_size=least, max_size=longest))
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    labels = draw(st.lists(st.integers(10, 999), min_size=len(ids), max_size=len(ids))) if labelled else None
    begin = draw(st.integers(0, len(ids) - least))
    return SampleOf(ids, mask, labels, begin, draw(st.integers(begin + least, len(ids))))


@st.composite
def packs(draw: st.DrawFn, *, labelled: bool) -> tuple[list[SampleOf], ResolvedContract]:
    """Samples that fit a row, and a contract."""
    segment_multiple, pack_multiple = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 4]))
    unit = math.lcm(segment_multiple, pack_multiple)
    contract = contract_of(
        seq_length=unit * draw(st.integers(1, 8)),
        segment_multiple=segment_multiple,
        pack_multiple=pack_multiple,
        tail_padding=draw(st.sampled_from(TailPadding)),
        pad_to_max_length=draw(st.booleans()),
        pad_cu_seqlens=draw(st.booleans()),
        max_segments=6 + draw(st.integers(0, 3)),
    )
    chosen: list[SampleOf] = []
    for sample in draw(st.lists(samples(contract.seq_length + 1, labelled), min_size=1, max_size=6)):
        if len(oracle_row([*chosen, sample], contract).tokens) <= contract.seq_length:
            chosen.append(sample)
    if not chosen:
        chosen = [SampleOf([11, 12], None, [12, 13] if labelled else None, 0, 1 if labelled else 2)]
    return chosen, contract


@settings(max_examples=120)
@given(packs(labelled=False) | packs(labelled=True))
def test_a_row_is_what_the_design_says_slot_by_slot(pack: tuple[list[SampleOf], ResolvedContract]) -> None:
    chosen, contract = pack
    expected = oracle_row(chosen, contract)
    row = _build([sample.piece(i) for i, sample in enumerate(chosen)], contract)
    real = row.geometry.real
    assert row.tokens.tolist() == expected.tokens
    assert np.where(real, row.targets().astype(np.int64), IGNORE).tolist() == expected.labels
    assert row.loss_mask.tolist() == expected.loss_mask
    assert row.geometry.position_ids.tolist() == expected.position_ids
    assert row.cu_seqlens.tolist() == expected.cu_seqlens
    assert row.cu_seqlens_padded.tolist() == expected.cu_seqlens_padded
    assert row.num_tokens == sum(len(sample.slots()) for sample in chosen)
    assert row.num_loss_tokens == sum(mask for sample in chosen for _, _, mask in sample.slots())
    assert not row.filler


def whole(ids: list[int], mask: list[int] | None = None, labels: list[int] | None = None) -> SampleOf:
    return SampleOf(ids, mask, labels, 0, len(ids))


def test_the_worked_example_of_the_design() -> None:
    contract = contract_of(16, segment_multiple=4)
    row = _build([whole([11, 12, 13, 14]).piece(0), whole([21, 22, 23, 24, 25, 26]).piece(1)], contract)
    assert row.tokens.tolist() == [11, 12, 13, PAD, 21, 22, 23, 24, 25, PAD, PAD, PAD, PAD, PAD, PAD, PAD]
    assert row.targets()[row.geometry.real].tolist() == [12, 13, 14, 22, 23, 24, 25, 26]
    assert row.cu_seqlens.tolist() == [0, 3, 8, 8]
    assert row.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert row.geometry.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert (row.num_tokens, row.num_loss_tokens) == (8, 8)


def test_the_mask_shifts_with_the_labels() -> None:
    """A prompt of two ids: the first slot trains on nothing, the second on the first id of the answer."""
    row = _build([whole([11, 12, 13, 14], mask=[0, 0, 1, 1]).piece(0)], contract_of(4))
    assert row.loss_mask.tolist() == [0, 1, 1, 0]


def test_own_labels_keep_every_slot() -> None:
    row = _build([whole([11, 12, 13], labels=[21, 22, 23]).piece(0)], contract_of(4))
    assert row.tokens.tolist() == [11, 12, 13, PAD]
    assert row.targets()[:3].tolist() == [21, 22, 23]
    assert row.cu_seqlens.tolist() == [0, 3, 3]


def test_samples_with_and_without_labels_of_their_own_share_a_row() -> None:
    row = _build([whole([11, 12, 13]).piece(0), whole([14, 15], labels=[24, 25]).piece(1)], contract_of(4))
    assert row.tokens.tolist() == [11, 12, 14, 15]
    assert row.targets().tolist() == [12, 13, 24, 25]


@pytest.mark.parametrize("tail", TailPadding)
def test_a_full_row_has_no_tail(tail: TailPadding) -> None:
    row = _build([whole([11, 12, 13]).piece(0), whole([14, 15, 16]).piece(1)], contract_of(4, tail_padding=tail))
    assert row.cu_seqlens.tolist() == row.cu_seqlens_padded.tolist() == [0, 2, 4]


def test_the_tail_is_a_segment_of_its_own_or_extends_the_last() -> None:
    piece = whole([11, 12, 13]).piece(0)
    own = _build([piece], contract_of(4))
    assert (own.cu_seqlens.tolist(), own.cu_seqlens_padded.tolist()) == ([0, 2, 2], [0, 2, 4])
    assert own.geometry.position_ids.tolist() == [0, 1, 0, 1]
    extended = _build([piece], contract_of(4, tail_padding="extend_last"))
    assert (extended.cu_seqlens.tolist(), extended.cu_seqlens_padded.tolist()) == ([0, 2], [0, 4])
    assert extended.geometry.position_ids.tolist() == [0, 1, 2, 3]


def test_a_row_that_its_segments_do_not_fit_is_refused() -> None:
    samples = [whole([11, 12, 13, 14]).piece(0), whole([21, 22, 23, 24, 25, 26]).piece(1)]
    with pytest.raises(ContractError, match=r"segments of 12 slots do not fit a row of 8; raise seq_length"):
        _build(samples, contract_of(8, segment_multiple=4))


def test_more_segments_than_the_fixed_number_are_refused() -> None:
    samples = [whole([11, 12]).piece(number) for number in range(3)]
    with pytest.raises(ContractError, match="a row of 3 segments where max_segments=2; raise max_segments"):
        _build(samples, contract_of(4, pad_cu_seqlens=True, max_segments=2))


def test_a_trimmed_row_is_as_wide_as_both_multiples_ask() -> None:
    contract = contract_of(48, segment_multiple=4, pack_multiple=6, pad_to_max_length=False)
    row = _build([whole([11, 12, 13, 14, 15, 16]).piece(0)], contract)  # 5 slots, 8 with alignment
    assert len(row.tokens) == 12
    assert row.cu_seqlens_padded.tolist() == [0, 8, 12]
