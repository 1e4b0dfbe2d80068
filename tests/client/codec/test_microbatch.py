"""The micro-batch as a training loop uses it: tensors, devices, masked labels, positions."""

from __future__ import annotations

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.position import ORIGIN, Position
from packhorse.feeding.torch_arrays import to_torch
from tests.strategies import RowCase, deliver, row_cases

TENSORS = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "padding_mask": torch.bool,
}


def held(micro_batch: MicroBatch) -> list[str]:
    """The arrays of a micro-batch; the padding mask is there only where the contract asks for it."""
    return [name for name in TENSORS if getattr(micro_batch, name) is not None]


ROWS = st.one_of(row_cases(), row_cases().map(RowCase.as_filler))


@given(ROWS)
def test_tensors_have_the_dtypes_shapes_and_values_of_the_arrays(case: RowCase) -> None:
    for rank in range(case.layout.context):
        arrays = deliver(case, rank)
        tensors = to_torch(arrays, pin=False)
        assert held(tensors) == [name for name in TENSORS if name != "padding_mask" or case.contract.padding_mask]
        for name in held(tensors):
            dtype, tensor = TENSORS[name], getattr(tensors, name)
            assert isinstance(tensor, torch.Tensor)
            assert (tensor.dtype, tensor.is_contiguous()) == (dtype, True)
            assert tensor.tolist() == getattr(arrays, name).tolist()


@given(ROWS)
def test_counts_stay_on_the_host(case: RowCase) -> None:
    arrays = deliver(case, with_keys=True)
    tensors = to_torch(arrays, pin=False).to("cpu")
    assert all(type(offsets) is np.ndarray for offsets in tensors.host_offsets)
    for field in fields(MicroBatch):
        if field.name not in TENSORS:
            assert getattr(tensors, field.name) == getattr(arrays, field.name)
            assert not isinstance(getattr(tensors, field.name), torch.Tensor | np.generic)


@pytest.mark.parametrize("non_blocking", [False, True])
@given(case=row_cases())
def test_a_copy_on_a_device_has_every_tensor_there(case: RowCase, non_blocking: bool) -> None:
    here = to_torch(deliver(case), pin=False)
    there = here.to("cpu", non_blocking=non_blocking)
    assert held(there) == held(here)
    for name in held(here):
        assert getattr(there, name).device == torch.device("cpu")
        assert torch.equal(getattr(there, name), getattr(here, name))


@settings(max_examples=3)
@given(row_cases())
def test_a_device_is_named_by_text_or_object(case: RowCase) -> None:
    micro_batch = to_torch(deliver(case), pin=False)
    assert all(getattr(micro_batch.to("meta"), name).device.type == "meta" for name in held(micro_batch))
    assert all(getattr(micro_batch.to(torch.device("meta")), name).device.type == "meta" for name in held(micro_batch))


@given(ROWS)
def test_masked_labels_ignore_whatever_is_not_trained_on(case: RowCase) -> None:
    for rank in range(case.layout.context):
        arrays = deliver(case, rank)
        before = arrays.labels.copy()
        expected = [
            label if trained else case.contract.ignore_index
            for label, trained in zip(arrays.labels.tolist(), arrays.loss_mask.tolist(), strict=True)
        ]
        assert arrays.masked_labels().tolist() == expected
        assert np.array_equal(arrays.labels, before), "the labels themselves are left alone"
        tensors = to_torch(arrays, pin=False)
        assert tensors.masked_labels().tolist() == expected
        assert tensors.masked_labels().dtype == torch.int64
        assert torch.equal(tensors.labels, torch.from_numpy(before))


@given(ROWS)
def test_cross_entropy_over_masked_labels_counts_the_local_loss_tokens(case: RowCase) -> None:
    tensors = to_torch(deliver(case), pin=False)
    assert int((tensors.masked_labels() != case.contract.ignore_index).sum()) == tensors.local_loss_tokens
    assert tensors.loss_mask.sum().item() == tensors.local_loss_tokens


@given(row_cases(context=(2, 4)))
def test_slots_are_the_same_from_tensors_and_arrays(case: RowCase) -> None:
    arrays = deliver(case, 1)
    assert np.array_equal(to_torch(arrays, pin=False).slots(), arrays.slots())


@given(row_cases())
def test_a_micro_batch_is_equal_to_itself_alone_and_survives_a_copy(case: RowCase) -> None:
    """In a set, a cache or another process; arrays are never compared for it."""
    micro_batch = deliver(case, with_keys=True)
    for other in (copy.copy(micro_batch), copy.deepcopy(micro_batch), pickle.loads(pickle.dumps(micro_batch))):
        assert other != micro_batch
        assert other in {other, micro_batch}
        assert repr(other) == repr(micro_batch)
        assert all(np.array_equal(getattr(other, name), getattr(micro_batch, name)) for name in held(micro_batch))
    assert weakref.ref(micro_batch)() is micro_batch


@settings(max_examples=3)
@given(row_cases())
def test_a_micro_batch_is_not_changed_in_place(case: RowCase) -> None:
    with pytest.raises(AttributeError):
        deliver(case).step = 3  # type: ignore[misc]


@given(st.integers(0, 100), st.integers(1, 20))
def test_positions_count_the_micro_batches_of_a_rank(steps: int, num_microbatches: int) -> None:
    position = ORIGIN
    for number in range(steps):
        assert position == divmod(number, num_microbatches)
        following = position.after(num_microbatches)
        assert following > position
        position = following


def test_positions_order_by_step_first() -> None:
    assert Position(1, 0) > Position(0, 9)
    assert max(Position(2, 1), Position(2, 3)) == Position(step=2, index=3)
