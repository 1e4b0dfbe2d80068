"""Bytes on the wire for each token that is delivered: all frames of BATCH, on realistic lengths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from packhorse.contract.batch_contract import BatchContract, ResolvedContract, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import Position
from packhorse.rows.row import Row
from packhorse.wire.messages import Batch, encode
from packhorse_service.framing import FramedStep, View, frame_step, view_key
from packhorse_service.mixing.piece import Piece
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingPlan
from tests.length_streams import log_normal, packs_of
from tests.service.corpus import build_row, make_block

SEQ_LENGTH = 8192
ROWS = 8
SNAPSHOT = bytes(1024)  # behind the last micro-batch of a step; of a stream of a few sources
LOW_WATERMARK = Position(1000, 3)  # of a run that has gone on for a while


def rows_of(contract: ResolvedContract) -> list[Row]:
    """Packs of log-normal samples of about 500 slots, with random ids."""
    random = np.random.default_rng(0)
    sizes: list[int] = log_normal(2000, SEQ_LENGTH).tolist()
    packer = FifoExactTailPacker(PackingPlan(capacity=SEQ_LENGTH, lookahead=16 * SEQ_LENGTH))
    rows = []
    multiple = contract.segment_multiple
    for pack in list(packs_of([-(-size // multiple) * multiple for size in sizes], packer, drain=False))[:ROWS]:
        samples = [random.integers(0, contract.vocab_size, sizes[number] + 1).tolist() for number in pack]
        block = make_block(samples)
        pieces = [
            Piece(number, 0, 0, block, number, begin, end, end - begin - 1)
            for number, (begin, end) in enumerate(pairwise(block.offsets.tolist()))
        ]
        rows.append(build_row([(piece,) for piece in pieces], contract))
    return rows


def step_of(layout: ParallelLayout, vocab_size: int) -> tuple[FramedStep, ResolvedContract]:
    declared = BatchContract(partition=Partition.ZIGZAG if layout.context > 1 else Partition.WHOLE)
    contract = resolve(declared, layout, seq_length=SEQ_LENGTH, global_batch_size=ROWS, vocab_size=vocab_size)
    return frame_step(1000, [rows_of(contract)], SNAPSHOT, contract, layout, with_keys=False), contract


def bytes_of(views: tuple[View, ...]) -> int:
    """What one reader gets of a step: the headers, the payloads, and the snapshot."""
    headers = (Batch(stream="train", attempt=bytes(8), low_watermark=LOW_WATERMARK, body=view.body) for view in views)
    return sum(len(encode(header)) for header in headers) + sum(len(view.payload) for view in views) + len(SNAPSHOT)


@pytest.mark.parametrize(("vocab_size", "most"), [(65_536, 2.3), (65_537, 4.3), (151_936, 4.3)])
def test_a_whole_row_takes_little_more_than_its_ids(vocab_size: int, most: float) -> None:
    step, contract = step_of(ParallelLayout(), vocab_size)
    views = step.views_of(view_key(Coordinates(0, 0, 0, 0), contract, ParallelLayout()))
    delivered = sum(view.body.num_tokens for view in views)
    assert delivered > 0.99 * ROWS * SEQ_LENGTH, "packs as full as they are"
    assert bytes_of(views) / delivered <= most


@pytest.mark.parametrize("context", [2, 4, 8])
def test_each_context_parallel_rank_receives_its_share_and_the_metadata(context: int) -> None:
    """Its share of ids, labels and mask; offsets, header and snapshot it gets like every other."""
    layout = ParallelLayout(context=context)
    step, contract = step_of(layout, 65_536)
    for rank in range(context):
        views = step.views_of(view_key(Coordinates(0, rank, 0, 0), contract, layout))
        slots = sum(view.body.slots for view in views)
        offsets = sum(entry.length * 4 for view in views for entry in view.body.arrays if entry.dtype == "<i4")
        assert slots == ROWS * SEQ_LENGTH // context
        share = slots * (2 + 2 + 1 / 8)
        assert share <= bytes_of(views) <= share + offsets + ROWS * (512 + 5 * 64) + len(SNAPSHOT)


def test_peers_of_one_view_share_it() -> None:
    layout = ParallelLayout(tensor=4)
    step, contract = step_of(layout, 65_536)
    of_peers = [step.views_of(view_key(Coordinates(0, 0, tensor, 0), contract, layout)) for tensor in range(4)]
    for peers in zip(*of_peers, strict=True):
        assert len({id(view.payload) for view in peers}) == 1
