"""What each pipeline stage uses of a micro-batch."""

from __future__ import annotations

import pytest

from packhorse import MicroBatch, ParallelLayout
from packhorse.codec.pipeline_stages import METADATA, Stage, needed, stage_of

ROW = {"tokens", "position_ids", "labels", "loss_mask"}


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_needs_the_offsets_of_a_packed_row_and_none_those_of_a_dense_one(stage: Stage) -> None:
    assert needed(stage, packed=True) >= METADATA
    assert not needed(stage, packed=False) & METADATA


def test_tokens_go_to_the_first_stage_and_targets_to_the_last() -> None:
    fields = {stage: needed(stage, packed=False) for stage in Stage}
    assert fields[Stage.FIRST] == {"tokens", "position_ids"}
    assert fields[Stage.LAST] == {"labels", "loss_mask"}
    assert fields[Stage.MIDDLE] == frozenset()
    assert fields[Stage.ONLY] == ROW


@pytest.mark.parametrize("stage", list(Stage))
def test_layers_that_predict_several_tokens_need_the_whole_row(stage: Stage) -> None:
    assert needed(stage, packed=True, mtp=True) == ROW | METADATA


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("mtp", [False, True])
def test_tokens_on_every_stage_come_beside_what_it_has_anyway(stage: Stage, mtp: bool) -> None:
    without = needed(stage, packed=True, mtp=mtp)
    assert needed(stage, packed=True, mtp=mtp, tokens=True) == without | {"tokens", "position_ids"}


@pytest.mark.parametrize("stage", list(Stage))
def test_the_padding_mask_goes_to_every_stage_or_to_none(stage: Stage) -> None:
    assert "padding_mask" in needed(stage, packed=True, padding_mask=True)
    assert "padding_mask" not in needed(stage, packed=True)


def test_needs_are_fields_of_a_micro_batch() -> None:
    every = needed(Stage.ONLY, packed=True, mtp=True, padding_mask=True)
    assert every <= set(MicroBatch.__struct_fields__)


def test_a_pipeline_has_one_first_and_one_last_stage() -> None:
    assert stage_of(ParallelLayout(), 0) is Stage.ONLY
    stages = [stage_of(ParallelLayout(pipeline=4), rank) for rank in range(4)]
    assert stages == [Stage.FIRST, Stage.MIDDLE, Stage.MIDDLE, Stage.LAST]
    assert [stage_of(ParallelLayout(pipeline=2), rank) for rank in range(2)] == [Stage.FIRST, Stage.LAST]
