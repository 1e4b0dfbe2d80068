"""DESIGN's invariants of delivered micro-batches, for random layouts, lengths and packing modes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.layout import ParallelLayout
from packhorse_service.framing import FramedStep, ViewKey
from tests.service.packing.test_modes import documents, pipeline, save, steps

MODES: list[dict[str, Any]] = [
    {"packing": "online"},
    {"packing": "online", "pad_to_max_length": False},
    {"packing": "online", "tail_padding": "extend_last"},
    {"packing": "online", "max_segments": 4, "pad_cu_seqlens": True},
    {"packing": "in_batch", "micro_batch_size": 2},
    {"packing": "concat"},
    {"packing": "concat", "isolate_documents": False, "micro_batch_size": 2},
    {"packing": "none", "micro_batch_size": 2},
]

CASES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(MODES),
        "data": st.sampled_from([1, 2, 3]),
        "context": st.sampled_from([1, 2, 4]),
        "partition": st.sampled_from(["zigzag", "contiguous"]),
        "rows": st.integers(1, 2),
        "lengths": st.lists(st.integers(2, 65), min_size=1, max_size=20),
    }
)


def views(case: dict[str, Any], partition: str, context: int) -> tuple[list[FramedStep], Any]:
    """Whole steps of a case, as one layout and partition is served."""
    mode, data = case["mode"], case["data"]
    size = data * case["rows"] * mode.get("micro_batch_size", 1)
    contract = {"seq_length": 64, "global_batch_size": size, "partition": partition, "segment_multiple": 8, **mode}
    contract["pack_multiple"] = 8
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), documents(case["lengths"]))
        made = pipeline(Path(folder), contract, {"data": data, "context": context})
        return list(steps(made)), made.plan


def micro_batch(step: FramedStep, plan: Any, rank: int, cut: int, index: int) -> MicroBatch:
    key = ViewKey(rank, cut if plan.contract.partition != "whole" else 0)
    view = step.views_of(key)[index]
    return Rebuilder(plan.contract, plan.layout, cut).rebuild(view.body, memoryview(view.payload))


def check_row(row: MicroBatch) -> None:
    """What holds of every whole row."""
    logical, physical = row.host_offsets
    assert np.all(np.diff(logical) <= np.diff(physical)), "logical is never longer than physical"
    tokens, labels = row.tokens.ravel(), row.labels.ravel()
    positions, mask = row.position_ids.ravel(), row.loss_mask.ravel()
    for start, end, length in zip(physical[:-1], physical[1:], np.diff(logical), strict=True):
        assert positions[start:end].tolist() == list(range(end - start)), "positions restart in each segment"
        assert not mask[start + length : end].any()
        if not row.filler and length:
            # The next id within the segment; the last label is in no slot of the row.
            assert labels[start : start + length - 1].tolist() == tokens[start + 1 : start + length].tolist()
            assert (labels[start + length : end] == row.ignore_index).all(), "labels never cross a segment"
    assert row.num_tokens == logical[-1]
    assert row.computed_digest() == row.row_digest


@settings(max_examples=120)
@given(case=CASES)
def test_slices_rows_and_counts_hold_for_every_layout_and_mode(case: dict[str, Any]) -> None:
    context = case["context"]
    whole, of_whole = views(case, "whole", context)
    cut, of_cut = views(case, case["partition"], context)
    assert len(whole) == len(cut)
    layout: ParallelLayout = of_cut.layout
    for rows, slices in zip(whole, cut, strict=True):
        assert {len(rows.views_of(key)) for key in rows.views} == {case["rows"]}, "every rank gets the same number"
        totals = 0
        for rank in range(layout.data):
            for index in range(case["rows"]):
                row = micro_batch(rows, of_whole, rank, 0, index)
                check_row(row)
                parts = [micro_batch(slices, of_cut, rank, part, index) for part in range(context)]
                held = np.concatenate([part.slots() for part in parts])
                assert sorted(held.tolist()) == list(range(row.width)), "each slot is held once"
                for name in ("tokens", "labels", "loss_mask", "position_ids"):
                    joined = np.concatenate([getattr(part, name).ravel() for part in parts])
                    assert np.array_equal(joined, getattr(row, name).ravel()[held])
                assert {part.tokens.size for part in parts} == {row.width // context}
                assert sum(part.local_loss_tokens for part in parts) == row.num_loss_tokens
                assert {part.row_digest for part in parts} == {row.row_digest}
                totals += row.num_loss_tokens
        assert row.step_loss_tokens == totals
