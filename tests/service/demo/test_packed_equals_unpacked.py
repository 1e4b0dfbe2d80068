"""Packing changes nothing: loss and gradients of four ranks on packed rows are those of the samples one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packhorse_service.demo.model import segment_mask
from packhorse_service.processes import Children
from tests.service.demo.rows_by_hand import (
    CONTEXT,
    DATA,
    ROWS,
    SAMPLES_PER_ROW,
    gradients,
    largest_difference,
    make_model,
    make_rows,
    make_samples,
    unpacked,
    whole_row_loss,
)
from tests.service.demo.running import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four real ranks, data 2 by context 2 on gloo, have saved what they got for every case."""
    folder = tmp_path_factory.mktemp("ranks")
    with Children(folder) as children:
        run_ranks(children, "tests.service.demo.rank_by_hand", [str(folder)], DATA * CONTEXT)
    return folder


@pytest.mark.parametrize("case", ROWS)
def test_four_ranks_get_the_loss_and_gradients_of_the_samples_run_one_by_one(folder: Path, case: str) -> None:
    loss, expected = unpacked(make_samples(ROWS[case] * SAMPLES_PER_ROW))
    for rank in range(DATA * CONTEXT):
        packed_loss, packed = torch.load(folder / f"{case}-{rank}.pt", weights_only=True)
        assert packed_loss == pytest.approx(loss, abs=1e-9)
        assert largest_difference(packed, expected) < 1e-9


def test_attention_across_segments_would_be_noticed() -> None:
    (row,) = make_rows(1)
    loss, expected = unpacked(make_samples(SAMPLES_PER_ROW))
    for offsets, same in ((row.cu_seqlens_padded, True), (row.cu_seqlens_padded[[0, -1]], False)):
        model = make_model()
        packed_loss = whole_row_loss(model, row, offsets)
        torch.autograd.backward(packed_loss)
        assert (abs(float(packed_loss.detach()) - loss) < 1e-9) is same
        assert (largest_difference(gradients(model), expected) < 1e-9) is same
        assert (largest_difference(gradients(model), expected) > 1e-4) is not same


def test_every_query_sees_its_own_slot_and_nothing_of_another_segment() -> None:
    offsets = torch.tensor([0, 4, 12, 16], dtype=torch.int32)
    for rank, queries in enumerate(([0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14])):
        mask = segment_mask(offsets, 2, rank)
        keys = torch.tensor([0, 3, 4, 5, 10, 11, 12, 15, 1, 2, 6, 7, 8, 9, 13, 14])
        for query, seen in zip(queries, mask, strict=True):
            start = max(edge for edge in (0, 4, 12) if edge <= query)
            assert sorted(keys[seen].tolist()) == list(range(start, query + 1))
