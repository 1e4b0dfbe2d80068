"""A row digest is the same in every view of a row and differs wherever the row does."""

from __future__ import annotations

import struct
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from packhorse.contract.partition import Partition
from packhorse.errors import ContractError
from packhorse.feeding.torch_arrays import to_torch
from packhorse.rows.geometry import Geometry
from packhorse.rows.row import Row
from packhorse.rows.row_digest import row_digest
from tests.strategies import RowCase, deliver, row_cases

POSITIONS = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 20))
ROWS = st.one_of(row_cases(), row_cases().map(RowCase.as_filler))


def digest_by_hand(case: RowCase, step: int, index: int) -> bytes:
    """The words of the design, one number after the other."""
    own, filler = case.own_labels, case.row.filler
    ids: list[int] = []
    for sample in case.samples:
        ids += sample.tokens
        ids += () if own or filler else sample.targets[-1:]
    mask = [bit for bit, real in zip(case.slots.mask, case.slots.real, strict=True) if real]
    mask_bytes = bytes(sum(bit << n for n, bit in enumerate(mask[at : at + 8])) for at in range(0, len(mask), 8))
    offsets = [*case.slots.cu_seqlens, *case.slots.cu_seqlens_padded]
    content = struct.pack(f"<{len(ids)}I", *ids) + mask_bytes + struct.pack(f"<{len(offsets)}i", *offsets)
    content += struct.pack("<2q", step, index)
    if own and not filler:
        labels = [target for sample in case.samples for target in sample.targets]
        content += struct.pack(f"<{len(labels)}I", *labels)
    return blake2b(content, digest_size=16).digest()


@given(ROWS, POSITIONS)
def test_a_row_digest_is_that_of_the_design(case: RowCase, position: tuple[int, int]) -> None:
    assert case.row.digest(*position) == digest_by_hand(case, *position)


@given(ROWS, POSITIONS)
def test_what_was_delivered_has_the_digest_that_the_server_computed(case: RowCase, position: tuple[int, int]) -> None:
    step, index = position
    for rank in range(case.layout.context):
        micro_batch = deliver(case, rank, step=step, index=index)
        assert micro_batch.row_digest == case.row.digest(step, index)
        if micro_batch.holds_whole_row:
            assert micro_batch.computed_digest() == micro_batch.row_digest
            assert to_torch(micro_batch, pin=False).computed_digest() == micro_batch.row_digest
        else:
            with pytest.raises(ContractError, match="this rank holds a part of it"):
                micro_batch.computed_digest()


@given(row_cases())
def test_every_view_of_a_row_carries_one_digest(case: RowCase) -> None:
    digests = {
        deliver(replace(case, contract=replace(case.contract, partition=partition, vocab_size=vocab)), rank).row_digest
        for partition in (Partition.WHOLE, case.contract.partition)
        for vocab in (case.contract.vocab_size, 200_000)
        for rank in range(case.layout.context)
    }
    assert len(digests) == 1


@given(row_cases())
def test_targets_are_no_memory_that_was_never_written(case: RowCase) -> None:
    """They travel in context-parallel slices, padding and all, and must be the same bytes from every server."""
    fresh = [replace(case.row, keys=()).targets() for _ in range(2)]
    real = np.array(case.slots.real)
    assert case.row.labels is not None or real[-1] or fresh[0][-1] == fresh[1][-1] == 0


@given(row_cases())
def test_a_digest_made_from_the_ids_in_one_is_that_of_the_arrays(case: RowCase) -> None:
    row, again = case.row, replace(case.row, keys=())
    if row.labels is None:
        parts = [
            np.append(row.tokens[at], last) for at, last in zip(row.geometry.segments, row.last_targets, strict=True)
        ]
        again = replace(case.row, keys=(), joined_ids=np.concatenate(parts))
        assert "content" in vars(again), "hashed at once, as the ids are not kept"
    arrays = row.tokens, row.targets(), row.loss_mask, row.cu_seqlens, row.cu_seqlens_padded
    assert again.digest(3, 4) == row_digest(*arrays, step=3, index=4, own_labels=row.labels is not None)


@given(row_cases())
def test_padding_is_not_part_of_the_digest(case: RowCase) -> None:
    real = np.array(case.slots.real)
    tokens = np.where(real, case.row.tokens, 12345).astype(np.uint32)
    labels = None if case.row.labels is None else np.where(real, case.row.labels, 54321).astype(np.uint32)
    padded_otherwise = Row(
        tokens,
        case.row.last_targets,
        case.row.loss_mask,
        case.row.cu_seqlens,
        case.row.cu_seqlens_padded,
        labels,
        keys=(),
    )
    assert padded_otherwise.digest(1, 2) == case.row.digest(1, 2)


@given(row_cases(), st.data())
def test_a_changed_id_changes_the_digest(case: RowCase, data: st.DataObject) -> None:
    slot = data.draw(st.sampled_from([slot for slot, real in enumerate(case.slots.real) if real]))
    tokens = case.row.tokens.copy()
    tokens[slot] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert replace(case.row, tokens=tokens).digest(1, 2) != case.row.digest(1, 2)


@given(row_cases(), st.data())
def test_a_changed_target_changes_the_digest(case: RowCase, data: st.DataObject) -> None:
    """The last target of a segment, or any label where a source brings its own."""
    bit = np.uint32(1 << data.draw(st.integers(0, 31)))
    if case.row.labels is None:
        targets = case.row.last_targets.copy()
        targets[data.draw(st.integers(0, len(targets) - 1))] ^= bit
        other = replace(case.row, last_targets=targets)
    else:
        labels = case.row.labels.copy()
        labels[data.draw(st.sampled_from([slot for slot, real in enumerate(case.slots.real) if real]))] ^= bit
        other = replace(case.row, labels=labels)
    assert other.digest(1, 2) != case.row.digest(1, 2)


@given(row_cases(), st.data())
def test_a_changed_mask_bit_changes_the_digest(case: RowCase, data: st.DataObject) -> None:
    mask = case.row.loss_mask.copy()
    mask[data.draw(st.sampled_from([slot for slot, real in enumerate(case.slots.real) if real]))] ^= 1
    assert replace(case.row, partial_loss_mask=mask).digest(1, 2) != case.row.digest(1, 2)


@given(row_cases(), POSITIONS)
def test_without_a_mask_every_logical_slot_is_supervised(case: RowCase, position: tuple[int, int]) -> None:
    unsaid = replace(case.row, partial_loss_mask=None)
    said = replace(case.row, partial_loss_mask=np.array(case.slots.real, np.uint8))
    assert unsaid.loss_mask.tolist() == said.loss_mask.tolist()
    assert unsaid.mask_bits.tobytes() == said.mask_bits.tobytes()
    assert unsaid.num_loss_tokens == said.num_loss_tokens == case.row.num_tokens
    assert unsaid.digest(*position) == said.digest(*position)


def plain_row(logical: list[int], physical: list[int]) -> Row:
    """Rows that differ in nothing but their offsets: the same ids in the same order, with own labels."""
    offsets = np.array(logical, np.int32), np.array(physical, np.int32)
    real = [
        slot - start < length
        for start, end, length in zip(physical, physical[1:], np.diff(offsets[0]).tolist(), strict=False)
        for slot in range(start, end)
    ]
    tokens = np.zeros(physical[-1], np.uint32)
    tokens[real] = np.arange(1, logical[-1] + 1)
    mask = np.array(real, np.uint8)
    return Row(tokens, np.array([], np.uint32), mask, *offsets, labels=tokens)


OFFSETS = st.lists(
    st.integers(0, 3).flatmap(lambda length: st.tuples(st.just(length), st.integers(length, 4))), min_size=1, max_size=4
).map(lambda lengths: tuple(np.cumsum([0, *of_kind]).tolist() for of_kind in zip(*lengths, strict=True)))


@pytest.mark.parametrize("width", [65_535, 65_536, 65_537])
def test_positions_restart_in_each_segment_of_a_wide_row(width: int) -> None:
    """Around the width up to which 16 bits hold them; an empty segment may begin behind the last slot."""
    offsets = np.array([0, 3, width - 1, width, width])
    expected = [*range(3), *range(width - 4), 0]
    assert Geometry(offsets, offsets).position_ids.tolist() == expected


@given(OFFSETS, OFFSETS)
def test_a_changed_offset_changes_the_digest(
    one: tuple[list[int], list[int]], other: tuple[list[int], list[int]]
) -> None:
    assert (plain_row(*one).digest(1, 2) == plain_row(*other).digest(1, 2)) == (one == other)


def test_a_slot_that_moves_to_the_next_segment_changes_the_digest() -> None:
    assert plain_row([0, 2, 3], [0, 2, 4]).digest(1, 2) != plain_row([0, 1, 3], [0, 2, 4]).digest(1, 2)
    assert plain_row([0, 2, 3], [0, 2, 4]).digest(1, 2) != plain_row([0, 2, 3], [0, 3, 4]).digest(1, 2)


@given(row_cases(), POSITIONS, POSITIONS)
def test_a_changed_step_or_index_changes_the_digest(
    case: RowCase, one: tuple[int, int], other: tuple[int, int]
) -> None:
    assert (case.row.digest(*one) == case.row.digest(*other)) == (one == other)


@given(row_cases())
def test_a_filler_has_another_digest_than_its_row(case: RowCase) -> None:
    assert case.row.as_filler().digest(1, 2) != case.row.digest(1, 2)


@given(row_cases(context=(1,)), st.data())
def test_a_damaged_delivery_is_found_out(case: RowCase, data: st.DataObject) -> None:
    micro_batch = deliver(case)
    name = data.draw(st.sampled_from(("tokens", "labels", "loss_mask")))
    slot = data.draw(st.sampled_from([slot for slot, real in enumerate(case.slots.real) if real]))
    # Labels inside a segment are the next tokens again; only the last is told apart.
    inside = slot + 1 < len(case.slots.real) and case.slots.real[slot + 1]
    same_segment = inside and case.slots.segment_of[slot] == case.slots.segment_of[slot + 1]
    assume(name != "labels" or case.own_labels or not same_segment)
    array = getattr(micro_batch, name)
    array[slot] = 1 - array[slot]
    assert micro_batch.computed_digest() != micro_batch.row_digest


def test_a_digest_does_not_change_between_releases() -> None:
    row = Row(
        tokens=np.array([11, 12, 13, 0, 21, 22, 23, 24, 25, 0, 0, 0, 0, 0, 0, 0], np.uint32),
        last_targets=np.array([14, 26], np.uint32),
        partial_loss_mask=np.array([1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0], np.uint8),
        cu_seqlens=np.array([0, 3, 8, 8], np.int32),
        cu_seqlens_padded=np.array([0, 4, 12, 16], np.int32),
    )
    assert row.digest(0, 0).hex() == "e0d7ed1559cbb030fe7b1fdffd8aedd9"
    assert row.as_filler().digest(0, 0).hex() == "8adf5148ae21258bda63d5ecab6153ae"
