"""Every slot of a row goes to one context-parallel rank, cut per segment as the kernels cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.partition import Partition
from packhorse.errors import ContractError
from packhorse.rows.context_parallel import local_slots
from tests.shared_data import SHARED, shared

VECTORS = SHARED / "conformance" / "cp_vectors.json"

# Refusals that the arguments of ``local_slots`` cannot say.
NOT_EXPRESSIBLE = {
    "reject.total_not_multiple": "the width is the last offset, never a second number",
    "reject.total_zero": "a row of no slots has no real segment; a packer cannot make it",
    "reject.row_length_mismatch": "checked where a micro-batch is rebuilt",
    "reject.cu_single_entry": "checked where a micro-batch is rebuilt",
    "reject.cu_int64": "checked where a micro-batch is rebuilt: offsets travel as int32",
}


def vectors(*ops: str) -> list[Any]:
    """The cases of these operations; one skipped parameter where the folder is absent."""
    if not VECTORS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"needs shared/conformance/{VECTORS.name}"))]
    cases = json.loads(VECTORS.read_text())["cases"]
    wanted = [case for case in cases if case["op"] in ops and case["id"] not in NOT_EXPRESSIBLE]
    return [pytest.param(case, id=case["id"]) for case in wanted]


def is_refusal(case: dict[str, Any]) -> bool:
    return isinstance(case["expect"], dict) and case["expect"].get("outcome") == "reject"


def ranks_of(case: dict[str, Any]) -> dict[int, Any]:
    return {int(name.removeprefix("rank_")): value for name, value in case["expect"].items()}


@pytest.mark.parametrize("case", vectors("thd_partition_indices"))
def test_zigzag_is_transformer_engines_thd_partition(case: dict[str, Any]) -> None:
    offsets, context = case["input"]["cu_seqlens"], case["input"]["cp_size"]
    if not is_refusal(case):
        for rank, slots in ranks_of(case).items():
            assert local_slots(Partition.ZIGZAG, offsets, context, rank).tolist() == slots
    else:
        with pytest.raises(ContractError):
            local_slots(Partition.ZIGZAG, offsets, context, case["input"]["cp_rank"])


@pytest.mark.parametrize("case", vectors("slice_thd_for_cp_rank"))
def test_any_tensor_of_a_row_is_sliced_by_the_same_slots(case: dict[str, Any]) -> None:
    for rank, expected in ranks_of(case).items():
        slots = local_slots(Partition.ZIGZAG, case["input"]["cu_seqlens_padded"], case["input"]["cp_size"], rank)
        sliced = {name: np.array(case["input"]["tensors"][name])[slots].tolist() for name in expected}
        assert sliced == expected


@pytest.mark.parametrize("case", vectors("dense_partition_indices"))
def test_a_dense_zigzag_is_that_of_one_segment(case: dict[str, Any]) -> None:
    for rank, slots in ranks_of(case).items():
        found = local_slots(Partition.ZIGZAG, [0, case["input"]["length"]], case["input"]["cp_size"], rank)
        assert found.tolist() == slots


@pytest.mark.parametrize("case", vectors("contiguous_partition_indices"))
def test_contiguous_slices_are_runs(case: dict[str, Any]) -> None:
    for rank, slots in ranks_of(case).items():
        found = local_slots(Partition.CONTIGUOUS, [0, case["input"]["total_tokens"]], case["input"]["cp_size"], rank)
        assert found.tolist() == slots


@pytest.mark.parametrize("case", vectors("compare_partitions"))
def test_a_packed_row_is_cut_per_segment_and_not_as_a_whole(case: dict[str, Any]) -> None:
    offsets, context, rank = (case["input"][name] for name in ("cu_seqlens", "cp_size", "cp_rank"))
    assert local_slots(Partition.ZIGZAG, offsets, context, rank).tolist() == case["expect"]["thd_indices"]
    dense = local_slots(Partition.ZIGZAG, [0, offsets[-1]], context, rank)
    assert dense.tolist() == case["expect"]["dense_indices"]


def test_the_conformance_vectors_hold_what_these_tests_ask_for() -> None:
    cases = json.loads(shared("conformance/cp_vectors.json").read_text())["cases"]
    assert {case["id"] for case in cases} >= NOT_EXPRESSIBLE.keys()


@st.composite
def rows(draw: st.DrawFn) -> tuple[Partition, list[int], int]:
    """A partition, offsets that can be cut (empty segments among them) and a context-parallel size."""
    partition, context = draw(st.sampled_from(Partition)), draw(st.integers(1, 8))
    unit = {Partition.ZIGZAG: 2 * context, Partition.CONTIGUOUS: context, Partition.WHOLE: 1}[partition]
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    return partition, np.cumsum([0, *(unit * length for length in lengths)]).tolist(), context


@given(rows())
def test_each_slot_belongs_to_one_rank_and_all_ranks_hold_as_many(row: tuple[Partition, list[int], int]) -> None:
    partition, offsets, context = row
    slices = [local_slots(partition, offsets, context, rank).tolist() for rank in range(context)]
    if partition is Partition.WHOLE:
        assert slices == [list(range(offsets[-1]))] * context
    else:
        assert sorted(slot for of_rank in slices for slot in of_rank) == list(range(offsets[-1]))
        assert {len(of_rank) for of_rank in slices} == {offsets[-1] // context}


@given(rows())
def test_a_zigzag_holds_two_chunks_of_every_segment(row: tuple[Partition, list[int], int]) -> None:
    """Chunks r and 2·CP-1-r, written as the design writes it."""
    _, offsets, context = row
    offsets = [2 * context * offset for offset in offsets]
    for rank in range(context):
        expected: list[int] = []
        for start, end in pairwise(offsets):
            size = (end - start) // (2 * context)
            if context == 1:
                expected += range(start, end)
                continue
            for chunk in (rank, 2 * context - 1 - rank):
                expected += range(start + chunk * size, start + (chunk + 1) * size)
        assert local_slots(Partition.ZIGZAG, offsets, context, rank).tolist() == expected


@given(rows())
def test_causal_work_is_equal_between_the_ranks_of_a_zigzag(row: tuple[Partition, list[int], int]) -> None:
    """A slot attends to all slots of its segment up to itself: first and last chunks balance."""
    _, offsets, context = row
    offsets = [2 * context * offset for offset in offsets]
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    work = [int((slots - starts[slots]).sum()) for slots in slices_of(offsets, context)]
    assert len(set(work)) == 1


def slices_of(offsets: list[int], context: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [local_slots(Partition.ZIGZAG, offsets, context, rank) for rank in range(context)]


@given(rows())
def test_segments_without_slots_change_nothing(row: tuple[Partition, list[int], int]) -> None:
    partition, offsets, context = row
    doubled = [offset for offset in offsets for _ in range(2)]
    for rank in range(context):
        assert np.array_equal(
            local_slots(partition, doubled, context, rank), local_slots(partition, offsets, context, rank)
        )


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), context=st.integers(2, 8), data=st.data())
def test_a_segment_that_cannot_be_cut_evenly_is_refused(lengths: list[int], context: int, data: st.DataObject) -> None:
    offsets = np.cumsum([0, *lengths])
    rank = data.draw(st.integers(0, context - 1))
    uneven = [length for length in lengths if length % (2 * context)]
    if uneven:
        with pytest.raises(ContractError, match=rf"{uneven[0]} slots is not divisible by 2·CP={2 * context}.*multiple"):
            local_slots(Partition.ZIGZAG, offsets, context, rank)
    else:
        assert len(local_slots(Partition.ZIGZAG, offsets, context, rank)) == offsets[-1] // context


def test_a_row_that_cannot_be_cut_into_equal_runs_is_refused() -> None:
    with pytest.raises(ContractError, match="width 10 is not divisible by CP=4"):
        local_slots(Partition.CONTIGUOUS, [0, 10], 4, 0)
    assert local_slots(Partition.CONTIGUOUS, [0, 3, 12], 4, 3).tolist() == [9, 10, 11], "runs ignore segments"


@pytest.mark.parametrize("partition", Partition)
@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_outside_the_context_parallel_size_is_refused(partition: Partition, rank: int) -> None:
    with pytest.raises(ContractError, match=f"rank {rank} is outside"):
        local_slots(partition, [0, 8], 2, rank)


def test_lengths_are_multiples_of_what_the_cut_needs() -> None:
    assert [p.granularity(1) for p in Partition] == [1, 1, 1]
    assert {p: p.granularity(4) for p in Partition} == {
        Partition.ZIGZAG: 8,
        Partition.CONTIGUOUS: 4,
        Partition.WHOLE: 8,
    }
