"""A step is framed once for each coordinate that gets its own view, with totals of the whole step."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import BatchContract, ResolvedContract, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rows.context_parallel import local_slots
from packhorse.rows.payload import split_arrays
from packhorse.rows.row import Row
from packhorse_service.framing import FramedStep, ViewKey, frame_step, view_key
from packhorse_service.mixing.piece import Piece
from tests.service.corpus import build_row, consecutive, make_block

LAYOUT = ParallelLayout(data=2, context=2, tensor=2)


def contract_of(layout: ParallelLayout, partition: Partition, vocab_size: int = 1000) -> ResolvedContract:
    declared = BatchContract(partition=partition, segment_multiple=4)
    return resolve(declared, layout, seq_length=32, global_batch_size=4, vocab_size=vocab_size)


def make_rows(contract: ResolvedContract, *, filler: bool = False) -> list[list[Row]]:
    """``rows[rank][index]`` for two ranks of two micro-batches; the last may be a filler."""
    rows = []
    for number, lengths in enumerate([(9, 5, 14), (3,), (30,), (2, 2, 2)]):
        samples = consecutive(lengths, first=100 * number + 1)
        block = make_block(samples, loss_mask=[[i % 2 for i in range(len(ids))] for ids in samples])
        ends = block.offsets.tolist()
        pieces = [
            Piece(i, 0, 0, block, i, begin, end, end - begin - 1) for i, (begin, end) in enumerate(pairwise(ends))
        ]
        keys = tuple(("docs", f"shard-{number}", str(i)) for i in range(len(samples)))
        rows.append(build_row([(piece,) for piece in pieces], contract, keys))
    if filler:
        rows[3] = rows[2].as_filler()
    return [rows[:2], rows[2:]]


def framed(
    partition: Partition, *, filler: bool = False, with_keys: bool = False, vocab_size: int = 1000
) -> tuple[FramedStep, list[list[Row]], ResolvedContract]:
    contract = contract_of(LAYOUT, partition, vocab_size)
    rows = make_rows(contract, filler=filler)
    return frame_step(5, rows, b"snapshot", contract, LAYOUT, with_keys=with_keys), rows, contract


@pytest.mark.parametrize("partition", [Partition.ZIGZAG, Partition.CONTIGUOUS])
def test_each_slice_is_the_slots_of_its_rank(partition: Partition) -> None:
    step, rows, contract = framed(partition)
    assert set(step.views) == {ViewKey(0, 0), ViewKey(0, 1), ViewKey(1, 0), ViewKey(1, 1)}
    for (rank, cut, _), views in step.views.items():
        for index, view in enumerate(views):
            batch = Rebuilder(contract, LAYOUT, cut).rebuild(view.body, memoryview(view.payload))
            row = rows[rank][index]
            slots = local_slots(partition, row.cu_seqlens_padded, 2, cut)
            assert batch.tokens.tolist() == row.tokens[slots].tolist()
            assert batch.loss_mask.tolist() == row.loss_mask[slots].tolist()
            assert batch.local_loss_tokens == int(row.loss_mask[slots].sum())
            assert batch.labels.tolist() == np.where(row.geometry.real, row.targets().astype(int), -100)[slots].tolist()
            assert batch.cu_seqlens.tolist() == row.cu_seqlens.tolist()
            assert view.body.slots == 16


def test_whole_rows_have_one_view_a_data_parallel_rank() -> None:
    step, rows, contract = framed(Partition.WHOLE)
    assert set(step.views) == {ViewKey(0, 0), ViewKey(1, 0)}
    for (rank, _, _), views in step.views.items():
        for index, view in enumerate(views):
            batch = Rebuilder(contract, LAYOUT, 1).rebuild(view.body, memoryview(view.payload))
            assert batch.tokens.tolist() == rows[rank][index].tokens.tolist()
            assert batch.computed_digest() == view.body.row_digest


@pytest.mark.parametrize("partition", Partition)
def test_readers_of_one_coordinate_share_one_view(partition: Partition) -> None:
    """A view depends on the data and context coordinates alone: no bytes are made twice for tensor or pipeline."""
    step, _, contract = framed(partition)
    readers = [LAYOUT.coordinates(rank) for rank in range(LAYOUT.world_size)]
    for at in readers:
        key = view_key(at, contract, LAYOUT)
        assert key in step.views
        assert (key.data, key.context_rank) == (at.data, 0 if partition is Partition.WHOLE else at.context)
    assert {view_key(at, contract, LAYOUT) for at in readers} == set(step.views)


@pytest.mark.parametrize("partition", Partition)
@pytest.mark.parametrize("filler", [False, True])
def test_totals_are_of_whole_rows_over_all_ranks_and_local_ones_of_the_slice(
    filler: bool, partition: Partition
) -> None:
    """A filler's slots are not counted again, and it trains on none."""
    step, rows, _ = framed(partition, filler=filler)
    real = [row for of_rank in rows for row in of_rank if not row.filler]
    assert len(real) == (3 if filler else 4)
    supervised = sum(int(row.loss_mask.sum()) for row in real)
    for views in step.views.values():
        for view in views:
            assert view.body.step_tokens == sum(row.num_tokens for row in real)
            assert view.body.step_loss_tokens == supervised
            assert not view.body.filler or view.body.num_loss_tokens == view.body.local_loss_tokens == 0
    # Every slice counts its own supervised slots; those of all slices are the step's.
    assert sum(view.body.local_loss_tokens for views in step.views.values() for view in views) == supervised


def test_a_header_says_what_is_in_its_row() -> None:
    step, rows, _ = framed(Partition.ZIGZAG, filler=True)
    for (rank, _, _), views in step.views.items():
        assert [(view.body.step, view.body.index) for view in views] == [(5, 0), (5, 1)]
        for row, view in zip(rows[rank], views, strict=True):
            assert view.body.num_tokens == row.num_tokens
            assert view.body.num_loss_tokens == row.num_loss_tokens
            assert view.body.max_seqlen == max(np.diff(row.cu_seqlens_padded))
            assert view.body.filler == row.filler
            assert view.body.row_digest == row.digest(5, view.body.index)


def test_a_row_digest_is_that_of_the_design() -> None:
    """Ids of each segment, mask bits, both offsets, step and index; hashed here without the code of the row."""
    step, _, _ = framed(Partition.ZIGZAG)
    ids, mask = list(range(101, 104)), 0b10  # the second row: one sample of 3 ids, of which those at odd places train
    parts = [
        np.array(ids, "<u4").tobytes(),
        bytes([mask >> 1]),  # slots predict ids 1 and 2, so bit 0 is that of id 1
        np.array([0, 2, 2], "<i4").tobytes(),
        np.array([0, 4, 32], "<i4").tobytes(),
        np.array([5, 1], "<i8").tobytes(),
    ]
    assert step.views_of(ViewKey(0, 1))[1].body.row_digest == hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def test_a_digest_is_the_same_in_every_view_of_a_row() -> None:
    digests = [
        {(rank, view.body.index, view.body.row_digest) for (rank, _, _), views in step.views.items() for view in views}
        for step, _, _ in map(framed, Partition)
    ]
    assert digests[0] == digests[1] == digests[2]
    assert len(digests[0]) == 4


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_ids_are_as_narrow_as_the_vocabulary_allows(vocab_size: int, dtype: str) -> None:
    step, _, _ = framed(Partition.WHOLE, vocab_size=vocab_size)
    assert {array.name: array.dtype for array in step.views_of(ViewKey(0, 0))[0].body.arrays}["tokens"] == dtype


def test_keys_travel_on_request_and_never_with_a_filler() -> None:
    without, _, contract = framed(Partition.WHOLE)
    step, rows, _ = framed(Partition.WHOLE, filler=True, with_keys=True)
    for (rank, _, _), views in step.views.items():
        for index, view in enumerate(views):
            batch = Rebuilder(contract, LAYOUT, 0).rebuild(view.body, memoryview(view.payload))
            assert batch.keys == rows[rank][index].keys
            assert batch.keys or batch.filler
            plain = without.views_of(ViewKey(rank, 0))[index]
            assert "keys" not in split_arrays(plain.body.arrays, memoryview(plain.payload))


def test_the_snapshot_travels_with_the_step() -> None:
    step, _, _ = framed(Partition.WHOLE)
    assert (step.step, step.snapshot) == (5, b"snapshot")


FIELDS = ("tokens", "position_ids", "labels", "loss_mask")


@pytest.mark.parametrize(("stage", "mtp", "used"), [
    (0, False, {"tokens", "position_ids"}),
    (1, False, set()),
    (2, False, {"labels", "loss_mask"}),
    (2, True, set(FIELDS)),
])  # fmt: skip
@pytest.mark.parametrize("partition", Partition)
def test_a_pipeline_stage_gets_the_fields_it_uses_and_all_get_the_metadata(
    partition: Partition, stage: int, mtp: bool, used: set[str]
) -> None:
    layout = ParallelLayout(data=2, context=2, pipeline=3)
    contract = contract_of(layout, partition, 1000)
    whole = ParallelLayout(data=2, context=2)
    rows = make_rows(contract, filler=False)
    step = frame_step(5, rows, b"", contract, layout, with_keys=False)
    at = Coordinates(1, 1, 0, stage)
    (view, _) = step.views_of(view_key(at, contract, layout, mtp=mtp))
    (full, _) = frame_step(5, rows, b"", contract, whole, with_keys=False).views_of(
        view_key(Coordinates(1, 1, 0, 0), contract, whole)
    )
    staged = Rebuilder(contract, layout, 1).rebuild(view.body, memoryview(view.payload))
    everything = Rebuilder(contract, whole, 1).rebuild(full.body, memoryview(full.payload))
    for name in FIELDS:
        if name in used:
            assert np.array_equal(getattr(staged, name), getattr(everything, name))
        else:
            assert getattr(staged, name) is None
    assert staged.cu_seqlens.tolist() == everything.cu_seqlens.tolist()
    assert staged.cu_seqlens_padded.tolist() == everything.cu_seqlens_padded.tolist()
    assert staged.local_loss_tokens == everything.local_loss_tokens
    assert (staged.max_seqlen, staged.row_digest) == (everything.max_seqlen, everything.row_digest)
    if not used:
        assert len(view.payload) < 200, "a middle stage gets no tokens"
