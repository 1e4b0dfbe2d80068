"""What each rank is handed, slot by slot, after it has been to the wire and back.

The oracle is ``tests.strategies.lay_out``: plain lists, written from the words of the design.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.codec.views import view_arrays
from packhorse.contract.batch_contract import BatchContract, Packing, TailPadding, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import ORIGIN
from packhorse.errors import ContractError, ProtocolError
from packhorse.rows.payload import join_arrays, split_arrays
from packhorse.wire.messages import Batch, decode, encode
from tests.strategies import (
    ATTEMPT,
    STEP_LOSS_TOKENS,
    STEP_TOKENS,
    RowCase,
    Sample,
    Slots,
    body_and_payload,
    deliver,
    lay_out,
    row_cases,
    row_of,
)

P, I = 0, -100  # noqa: E741  # padding and ignored, as the design writes them
AnyArray = npt.NDArray[Any]


def case_of(
    samples: list[Sample], layout: ParallelLayout, *, own_labels: bool = False, seq_length: int = 16, **declared: Any
) -> RowCase:
    contract = resolve(
        BatchContract(**declared), layout, seq_length=seq_length, global_batch_size=layout.data * 2, vocab_size=100
    )
    slots = lay_out(samples, contract)
    keys = tuple(("books", "a.tar", str(i)) for i in range(len(samples)))
    row = row_of(slots, samples, own_labels=own_labels, keys=keys)
    return RowCase(layout, contract, tuple(samples), own_labels, slots, row)


def sample_of(*ids: int) -> Sample:
    """A sample whose every target is trained on."""
    return Sample(ids[:-1], ids[1:], (1,) * (len(ids) - 1))


# The worked example of the design -------------------------------------------------------------------

TWO_SAMPLES = [sample_of(11, 12, 13, 14), sample_of(21, 22, 23, 24, 25, 26)]
WORKED = {
    "tokens": [11, 12, 13, P, 21, 22, 23, 24, 25, P, P, P, P, P, P, P],
    "labels": [12, 13, 14, I, 22, 23, 24, 25, 26, I, I, I, I, I, I, I],
    "position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
    "loss_mask": [1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],
}


def worked_example(partition: Partition) -> RowCase:
    return case_of(TWO_SAMPLES, ParallelLayout(context=2), partition=partition, segment_multiple=4)


def per_slot(micro_batch: MicroBatch) -> dict[str, list[int]]:
    return {name: getattr(micro_batch, name).tolist() for name in WORKED}


def test_the_worked_example_of_the_design_as_a_whole_row() -> None:
    for rank in range(2):
        micro_batch = deliver(worked_example(Partition.WHOLE), rank)
        assert per_slot(micro_batch) == WORKED
        assert micro_batch.cu_seqlens.tolist() == [0, 3, 8, 8]
        assert micro_batch.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
        assert (micro_batch.max_seqlen, micro_batch.num_tokens, micro_batch.num_loss_tokens) == (8, 8, 8)
        assert micro_batch.local_loss_tokens == 8
        assert micro_batch.width == 16


@pytest.mark.parametrize(
    ("rank", "slots", "local_loss_tokens"),
    [(0, [0, 3, 4, 5, 10, 11, 12, 15], 3), (1, [1, 2, 6, 7, 8, 9, 13, 14], 5)],
)
def test_the_worked_example_of_the_design_as_two_slices(rank: int, slots: list[int], local_loss_tokens: int) -> None:
    micro_batch = deliver(worked_example(Partition.ZIGZAG), rank)
    assert per_slot(micro_batch) == {name: [values[slot] for slot in slots] for name, values in WORKED.items()}
    assert micro_batch.slots().tolist() == slots
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 8, 8]
    assert micro_batch.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert (micro_batch.max_seqlen, micro_batch.num_tokens, micro_batch.num_loss_tokens) == (8, 8, 8)
    assert micro_batch.local_loss_tokens == local_loss_tokens


def test_a_tail_that_extends_the_last_segment_continues_its_positions() -> None:
    case = case_of(TWO_SAMPLES, ParallelLayout(context=2), segment_multiple=4, tail_padding=TailPadding.EXTEND_LAST)
    micro_batch = deliver(case)
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 8]
    assert micro_batch.cu_seqlens_padded.tolist() == [0, 4, 16]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, *range(12)]
    assert micro_batch.labels.tolist() == WORKED["labels"]


# Any row against plain lists ------------------------------------------------------------------------


def slots_of_rank(case: RowCase, rank: int) -> list[int]:
    """The slots a rank holds, chunk by chunk."""
    context, width = case.layout.context, len(case.slots.tokens)
    if context == 1 or case.contract.partition is Partition.WHOLE:
        return list(range(width))
    if case.contract.partition is Partition.CONTIGUOUS:
        share = width // context
        return list(range(rank * share, (rank + 1) * share))
    held: list[int] = []
    for start, end in pairwise(case.slots.cu_seqlens_padded):
        size = (end - start) // (2 * context)
        for chunk in (rank, 2 * context - 1 - rank):
            held += range(start + chunk * size, start + (chunk + 1) * size)
    return held


def local(values: list[int], held: list[int]) -> list[int]:
    return [values[slot] for slot in held]


ROWS = st.one_of(row_cases(), row_cases().map(RowCase.as_filler))


@given(ROWS)
def test_every_rank_is_handed_what_the_design_says_slot_by_slot(case: RowCase) -> None:
    slots: Slots = case.slots
    for rank in range(case.layout.context):
        micro_batch = deliver(case, rank)
        held = slots_of_rank(case, rank)
        assert per_slot(micro_batch) == {
            "tokens": local(slots.tokens, held),
            "labels": local(slots.labels, held),
            "loss_mask": local(slots.mask, held),
            "position_ids": local(slots.positions, held),
        }
        assert micro_batch.cu_seqlens.tolist() == slots.cu_seqlens
        assert micro_batch.cu_seqlens_padded.tolist() == slots.cu_seqlens_padded
        assert micro_batch.slots().tolist() == held
        assert [offsets.tolist() for offsets in micro_batch.host_offsets] == [slots.cu_seqlens, slots.cu_seqlens_padded]
        if case.contract.padding_mask:
            assert micro_batch.padding_mask.tolist() == [not slots.real[slot] for slot in held]
        else:
            assert micro_batch.padding_mask is None


@given(ROWS)
def test_counts_are_of_the_whole_row_and_the_whole_step_but_for_the_local_one(case: RowCase) -> None:
    for rank in range(case.layout.context):
        micro_batch = deliver(case, rank, step=9, index=2)
        assert micro_batch.num_tokens == sum(case.slots.real)
        assert micro_batch.num_loss_tokens == sum(case.slots.mask)
        assert micro_batch.local_loss_tokens == sum(case.slots.mask[slot] for slot in slots_of_rank(case, rank))
        assert micro_batch.max_seqlen == max(b - a for a, b in pairwise(case.slots.cu_seqlens_padded))
        assert (micro_batch.step_tokens, micro_batch.step_loss_tokens) == (STEP_TOKENS, STEP_LOSS_TOKENS)
        assert (micro_batch.step, micro_batch.index, micro_batch.position) == (9, 2, (9, 2))
        assert micro_batch.num_microbatches == case.contract.global_batch_size // case.layout.data
        assert micro_batch.width == len(case.slots.tokens)
        assert (micro_batch.context_rank, micro_batch.context_size) == (rank, case.layout.context)
        assert micro_batch.holds_whole_row == (len(micro_batch.tokens) == micro_batch.width)


DTYPES = {
    "tokens": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "position_ids": np.int64,
    "cu_seqlens": np.int32,
    "cu_seqlens_padded": np.int32,
}


@given(ROWS)
def test_dtypes_and_shapes_are_those_of_the_table(case: RowCase) -> None:
    cut = 1 if case.contract.partition is Partition.WHOLE else case.layout.context
    width, offsets = len(case.slots.tokens) // cut, len(case.slots.cu_seqlens)
    for rank in range(case.layout.context):
        micro_batch = deliver(case, rank)
        for name, dtype in DTYPES.items():
            array = getattr(micro_batch, name)
            assert array.dtype == dtype
            assert array.shape == ((offsets,) if name.startswith("cu_") else (width,))
            assert array.flags.writeable, f"{name} is a view of the frame"


@given(row_cases(context=(1, 2, 4)))
def test_union_of_context_parallel_slices_is_the_row(case: RowCase) -> None:
    """Each slot once, and the supervised slots add up."""
    if case.contract.partition is Partition.WHOLE:
        case = replace(case, contract=replace(case.contract, partition=Partition.ZIGZAG))
    slices = [deliver(case, rank) for rank in range(case.layout.context)]
    order = np.concatenate([micro_batch.slots() for micro_batch in slices])
    assert sorted(order.tolist()) == list(range(len(case.slots.tokens)))
    expected = {
        "tokens": case.slots.tokens,
        "labels": case.slots.labels,
        "loss_mask": case.slots.mask,
        "position_ids": case.slots.positions,
    }
    for name, values in expected.items():
        whole = np.concatenate([getattr(micro_batch, name) for micro_batch in slices])
        assert whole[np.argsort(order)].tolist() == values
    assert sum(micro_batch.local_loss_tokens for micro_batch in slices) == slices[0].num_loss_tokens
    assert len({(micro_batch.row_digest, micro_batch.num_tokens) for micro_batch in slices}) == 1


@given(row_cases(context=(1,)))
def test_labels_are_the_next_id_of_the_same_sample_and_never_cross_into_another(case: RowCase) -> None:
    micro_batch = deliver(case)
    lengths = np.diff(micro_batch.cu_seqlens).tolist()
    segments = list(zip(micro_batch.cu_seqlens_padded.tolist(), lengths, strict=False))
    for (start, length), sample in zip(segments, case.samples, strict=False):
        tokens, labels = (getattr(micro_batch, name)[start : start + length].tolist() for name in ("tokens", "labels"))
        assert (tuple(tokens), tuple(labels)) == (sample.tokens, sample.targets)
        if not case.own_labels:
            assert labels[:-1] == tokens[1:]
    assert int((micro_batch.labels != case.contract.ignore_index).sum()) == sum(lengths)


@given(ROWS)
def test_positions_restart_in_each_segment_and_logical_lengths_fit_into_physical_ones(case: RowCase) -> None:
    micro_batch = deliver(case)
    logical, physical = np.diff(micro_batch.cu_seqlens), np.diff(micro_batch.cu_seqlens_padded)
    assert np.all((logical >= 0) & (logical <= physical))
    assert micro_batch.cu_seqlens[0] == micro_batch.cu_seqlens_padded[0] == 0
    if micro_batch.holds_whole_row:
        assert micro_batch.position_ids.tolist() == [slot for length in physical for slot in range(length)]


@given(row_cases())
def test_a_filler_is_the_same_row_with_nothing_to_train_on(case: RowCase) -> None:
    for rank in range(case.layout.context):
        real, filler = deliver(case, rank, with_keys=True), deliver(case.as_filler(), rank, with_keys=True)
        for name in ("tokens", "position_ids", "cu_seqlens", "cu_seqlens_padded"):
            assert np.array_equal(getattr(filler, name), getattr(real, name))
        assert not filler.loss_mask.any()
        assert set(filler.labels.tolist()) == {case.contract.ignore_index}
        assert (filler.filler, filler.num_loss_tokens, filler.local_loss_tokens, filler.keys) == (True, 0, 0, ())
        assert (real.filler, filler.num_tokens) == (False, real.num_tokens)


@given(row_cases(), st.booleans())
def test_keys_travel_on_request(case: RowCase, with_keys: bool) -> None:
    assert deliver(case, with_keys=with_keys).keys == (case.row.keys if with_keys else ())


@pytest.mark.parametrize(
    ("partition", "own_labels", "names"),
    [
        (Partition.WHOLE, False, {"last_targets"}),
        (Partition.WHOLE, True, {"own_labels"}),
        (Partition.ZIGZAG, False, {"labels"}),
        (Partition.ZIGZAG, True, {"own_labels"}),
        (Partition.CONTIGUOUS, False, {"labels"}),
    ],
)
def test_labels_travel_only_where_they_do_not_follow_from_the_tokens(
    partition: Partition, own_labels: bool, names: set[str]
) -> None:
    case = case_of(
        TWO_SAMPLES, ParallelLayout(context=2), partition=partition, segment_multiple=4, own_labels=own_labels
    )
    view = view_arrays(case.row, case.contract, case.layout, 0)
    assert {entry.name for entry in view.table} == names | {"tokens", "loss_mask", "cu_seqlens", "cu_seqlens_padded"}


STAGES = {
    "first": {"tokens", "position_ids"},
    "middle": set[str](),
    "last": {"labels", "loss_mask"},
    "only": {"tokens", "position_ids", "labels", "loss_mask"},
}


@pytest.mark.parametrize("stage", STAGES)
@given(case=ROWS)
def test_a_pipeline_stage_is_handed_what_it_uses_and_the_offsets(stage: str, case: RowCase) -> None:
    needs = STAGES[stage]
    for rank in range(case.layout.context):
        whole = deliver(case, rank)
        body, _ = body_and_payload(case, rank)
        view = view_arrays(case.row, case.contract, case.layout, rank, needs)
        body = structs.replace(body, arrays=view.table)
        part = Rebuilder(case.contract, case.layout, rank).rebuild(body, memoryview(view.payload))
        assert (view.slots, view.loss_tokens) == (body.slots, whole.local_loss_tokens)
        for name in WORKED:
            if name in needs:
                assert getattr(part, name).tolist() == getattr(whole, name).tolist()
            else:
                assert getattr(part, name) is None
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            assert getattr(part, name).tolist() == getattr(whole, name).tolist()
        assert np.array_equal(part.padding_mask, whole.padding_mask)
        assert part.slots().tolist() == whole.slots().tolist()
        if stage != "only":
            with pytest.raises(ContractError, match="this rank holds a part of it"):
                part.computed_digest()


@given(case=ROWS, shift=st.integers(1, 63))
def test_a_payload_may_begin_at_any_address(case: RowCase, shift: int) -> None:
    """A small frame lies wherever it was received, behind another."""
    for rank in range(case.layout.context):
        body, payload = body_and_payload(case, rank, with_keys=True)
        shifted = memoryview(bytearray(shift) + payload)[shift:]
        found = Rebuilder(case.contract, case.layout, rank).rebuild(body, shifted)
        expected = Rebuilder(case.contract, case.layout, rank).rebuild(body, memoryview(payload))
        for name in (*DTYPES, "padding_mask"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
        assert found.keys == expected.keys


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16])
def test_a_loss_mask_is_exact_where_every_slot_is_trained_on_and_where_one_is_not(width: int) -> None:
    """The first kind is rebuilt without a look at each bit."""
    for untrained in (None, *range(width)):
        mask = tuple(int(slot != untrained) for slot in range(width))
        sample = Sample(tuple(range(10, 10 + width)), tuple(range(11, 11 + width)), mask)
        delivered = deliver(case_of([sample], ParallelLayout(), seq_length=width), 0)
        assert delivered.loss_mask.tolist() == list(mask)


@given(case=ROWS)
def test_what_was_rebuilt_stays_as_it_is_when_the_next_is(case: RowCase) -> None:
    for rank in range(case.layout.context):
        rebuilder = Rebuilder(case.contract, case.layout, rank)
        body, payload = body_and_payload(case, rank)
        first, second = (rebuilder.rebuild(body, memoryview(payload)) for _ in range(2))
        payload[:] = bytes(len(payload))
        expected = deliver(case, rank)
        for name in DTYPES:
            one, other = getattr(first, name), getattr(second, name)
            assert np.array_equal(one, getattr(expected, name))
            assert not np.shares_memory(one, other)
            assert one.flags.writeable, "a loop may change what it was handed"


# What does not fit together is refused --------------------------------------------------------------


def damaged(case: RowCase, arrays: dict[str, AnyArray | None], width: int | None = None) -> MicroBatch:
    """Rebuild a view of which some arrays were exchanged; ``None`` leaves one out."""
    body, payload = body_and_payload(case, 0)
    sent: dict[str, Any] = {**split_arrays(body.arrays, memoryview(payload)), **arrays}
    table, buffer = join_arrays({name: array for name, array in sent.items() if array is not None})
    body = structs.replace(body, arrays=table, slots=body.slots if width is None else width)
    return Rebuilder(case.contract, case.layout, 0).rebuild(body, memoryview(buffer))


def ints(*values: int, dtype: str = "<i4") -> AnyArray:
    return np.array(values, np.dtype(dtype))


SLICED = worked_example(Partition.ZIGZAG)
WHOLE = worked_example(Partition.WHOLE)


@pytest.mark.parametrize(
    ("case", "arrays"),
    [
        pytest.param(WHOLE, {"cu_seqlens": ints(0, 3, 8)}, id="offsets of two lengths"),
        pytest.param(WHOLE, {"cu_seqlens": ints(0), "cu_seqlens_padded": ints(0)}, id="a single offset"),
        pytest.param(WHOLE, {"cu_seqlens": ints(), "cu_seqlens_padded": ints()}, id="no offsets"),
        pytest.param(WHOLE, {"cu_seqlens": ints(1, 3, 8, 8)}, id="logical offsets that do not start at 0"),
        pytest.param(WHOLE, {"cu_seqlens_padded": ints(1, 4, 12, 16)}, id="physical ones that do not start at 0"),
        pytest.param(WHOLE, {"cu_seqlens": ints(0, 3, 2, 2)}, id="logical offsets that decrease"),
        pytest.param(WHOLE, {"cu_seqlens_padded": ints(0, 12, 4, 16)}, id="physical offsets that decrease"),
        pytest.param(WHOLE, {"cu_seqlens": ints(0, 5, 8, 8)}, id="a logical length over the physical one"),
        pytest.param(WHOLE, {"cu_seqlens": ints(0, 3, 8, -1)}, id="a sentinel of -1"),
        pytest.param(WHOLE, {"cu_seqlens_padded": ints(0, 4, 12, 17)}, id="a row wider than its tokens"),
        pytest.param(WHOLE, {"cu_seqlens_padded": ints(0, 4, 12, 15)}, id="a row narrower than its tokens"),
        pytest.param(WHOLE, {"tokens": ints(*range(15), dtype="<u2")}, id="a token too few"),
        pytest.param(WHOLE, {"loss_mask": ints(1, dtype="|u1")}, id="a short mask"),
        pytest.param(WHOLE, {"loss_mask": ints(1, 2, 3, dtype="|u1")}, id="a long mask"),
        pytest.param(WHOLE, {"last_targets": ints(14, dtype="<u2")}, id="a last target too few"),
        pytest.param(WHOLE, {"last_targets": ints(14, 26, 0, dtype="<u2")}, id="a target for the tail"),
        pytest.param(SLICED, {"labels": ints(*range(7), dtype="<u2")}, id="a label too few"),
        pytest.param(WHOLE, {"labels": ints(*range(16), dtype="<u2")}, id="labels of two kinds"),
        pytest.param(SLICED, {"cu_seqlens_padded": ints(0, 6, 12, 16)}, id="a segment that cannot be cut"),
        *(
            pytest.param(WHOLE, {name: None}, id=f"without {name}")
            for name in ("tokens", "loss_mask", "cu_seqlens", "cu_seqlens_padded", "last_targets")
        ),
    ],
)
def test_arrays_that_do_not_fit_one_another_are_refused(case: RowCase, arrays: dict[str, AnyArray | None]) -> None:
    with pytest.raises(ProtocolError):
        damaged(case, arrays)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("ends", [(12, 32), (32,), (8, 16, 32)], ids=["two widths", "one row", "three rows"])
def test_dense_rows_of_another_number_or_of_two_widths_are_refused(ends: tuple[int, ...], context: int) -> None:
    """Each is cut as the first is: a slice of others would have fewer slots than it says, or the wrong ones."""
    rows = [sample_of(*range(10, 26)), sample_of(*range(30, 46))]
    declared: dict[str, Any] = {"packing": Packing.NONE, "micro_batch_size": 2, "segment_multiple": 16}
    layout = ParallelLayout(context=context)
    partition = Partition.ZIGZAG if context > 1 else Partition.WHOLE
    dense = case_of(rows, layout, partition=partition, pad_to_max_length=False, **declared)
    assert deliver(dense, 0).tokens.shape == (2, 16 // context)
    offsets = ints(0, *ends)
    with pytest.raises(ProtocolError, match="2 dense rows of one width"):
        damaged(dense, {"cu_seqlens": offsets, "cu_seqlens_padded": offsets})


def test_a_slice_without_labels_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"last_targets|labels"):
        damaged(SLICED, {"labels": None})


def test_a_header_that_promises_another_width_is_refused() -> None:
    with pytest.raises(ProtocolError, match="15 slots where its offsets end at 16"):
        damaged(WHOLE, {}, width=15)


def test_a_row_without_slots_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no slots"):
        damaged(WHOLE, {"cu_seqlens": ints(0, 0), "cu_seqlens_padded": ints(0, 0)}, width=0)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cu_seqlens", "<i8"),
        ("cu_seqlens_padded", "<i8"),
        ("cu_seqlens", "<u2"),
        ("loss_mask", "<u2"),
        ("tokens", "<i8"),
        ("tokens", "<i4"),
        ("last_targets", "<i8"),
    ],
)
def test_an_array_of_a_dtype_that_is_not_its_own_is_refused(name: str, dtype: str) -> None:
    """Offsets of 64 bits would be wrapped to 32 in silence, and wide masks read a bit in every other byte."""
    body, payload = body_and_payload(WHOLE, 0)
    array = split_arrays(body.arrays, memoryview(payload))[name]
    with pytest.raises(ProtocolError, match=name):
        damaged(WHOLE, {name: array.astype(np.dtype(dtype))})


def test_a_row_wider_than_its_tokens_is_refused_before_memory_is_taken_for_it() -> None:
    """Two offsets of four bytes can promise 2³¹ slots."""
    width = 1 << 22
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            damaged(WHOLE, {"cu_seqlens": ints(0, 8), "cu_seqlens_padded": ints(0, width)})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < width


def test_a_damaged_header_never_fails_otherwise() -> None:
    """Two thousand headers with a byte changed: refused, or read as a micro-batch of the width it says."""
    source = random.Random(0)
    for case in (WHOLE, SLICED):
        body, payload = body_and_payload(case, 0, with_keys=True)
        header = encode(Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=body))
        for _ in range(1000):
            changed = bytearray(header)
            changed[source.randrange(len(header))] = source.randrange(256)
            try:
                message, extra = decode([bytes(changed), payload])
                assert isinstance(message, Batch)
                found = Rebuilder(case.contract, case.layout, 0).rebuild(message.body, memoryview(extra[0]))
            except ProtocolError:
                continue
            assert len(found.tokens) == len(found.labels) == message.body.slots


def test_a_micro_batch_has_the_fields_of_the_design() -> None:
    promised = {*WORKED, *DTYPES, "max_seqlen", "num_tokens", "num_loss_tokens", "local_loss_tokens", "step_tokens"}
    promised |= {"padding_mask", "host_offsets"}
    promised |= {"step_loss_tokens", "step", "index", "num_microbatches", "filler", "keys"}
    assert promised <= {f.name for f in structs.fields(MicroBatch)}
