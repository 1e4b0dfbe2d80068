"""Offsets of whole rows: what they refuse, and that the service lays rows out as they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse import TailPadding
from packhorse.errors import ContractError
from packhorse.rows.offsets import align, check_physical, fix_count, longest, merge_rows, pad_to_width, padding_mask
from packhorse_service.sources.formats import TokenArrays
from tests.conformance.rows import contract_of, drawn
from tests.service.corpus import build_row

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths=LENGTHS, multiple=st.integers(1, 5), spare=st.integers(0, 3), tail=st.sampled_from(TailPadding))
def test_the_service_lays_rows_out_in_the_same_way(
    lengths: list[int], multiple: int, spare: int, tail: TailPadding
) -> None:
    logical, physical = align(lengths, multiple)
    width, most = int(physical[-1]) + spare * multiple, len(lengths) + spare
    logical, physical = fix_count(*pad_to_width(logical, physical, width, tail), most, width)
    contract = contract_of(
        seq_length=width, segment_multiple=multiple, tail_padding=tail, pad_cu_seqlens=True, max_segments=most
    )
    samples = [TokenArrays(np.ones(n + 1, int)) for n in lengths]
    row = build_row([(piece,) for piece in drawn(samples, width)], contract)
    assert row.cu_seqlens.tolist() == logical.tolist()
    assert row.cu_seqlens_padded.tolist() == physical.tolist()
    assert int(padding_mask(logical, physical).sum()) == width - sum(lengths)
    assert check_physical(physical, width) is not None


def test_a_row_that_its_segments_do_not_fit_is_refused() -> None:
    with pytest.raises(ContractError, match=r"12 slots do not fit a row of 8; raise seq_length to 12"):
        pad_to_width(*align([3, 5], 4), 8, TailPadding.OWN_SEGMENT)


def test_more_segments_than_the_fixed_number_are_refused() -> None:
    with pytest.raises(ContractError, match="max_segments=1"):
        fix_count(*align([1, 1, 1], 1), 1, 3)


@pytest.mark.parametrize(
    ("offsets", "width", "what"),
    [
        (np.zeros((2, 3), np.int32), 8, "THD_ROWS"),
        (np.array([0, 8]), 8, "int64"),
        (np.array([0], np.int32), 8, "at least one segment"),
        (np.array([1, 8], np.int32), 8, "start at 0"),
        (np.array([0, 8, -1], np.int32), 8, "sentinels"),
        (np.array([0, 8], np.int32), 10, "row of 10"),
        (np.array([0, 0], np.int32), 0, "row of 0"),
    ],
)
def test_offsets_that_kernels_would_misread_are_refused(offsets: np.ndarray, width: int, what: str) -> None:
    with pytest.raises(ContractError, match=what):
        check_physical(offsets, width)


@given(rows=st.lists(st.lists(st.integers(1, 7), max_size=3, unique=True), min_size=1, max_size=4))
def test_merged_rows_keep_every_boundary_in_its_place(rows: list[list[int]]) -> None:
    whole = [[0, *sorted(cuts), 8] for cuts in rows]
    merged = merge_rows([[*row, 8] for row in whole], 8).tolist()
    assert merged == sorted(set(merged))
    assert set(merged) == {8 * i + offset for i, row in enumerate(whole) for offset in row}
    assert longest(np.array(merged)) == max(b - a for row in whole for a, b in pairwise(row))


def test_a_row_that_does_not_reach_its_end_is_not_merged() -> None:
    with pytest.raises(ContractError, match=r"row 1 .* do not reach its 8 slots"):
        merge_rows([[0, 8], [0, 4]], 8)
