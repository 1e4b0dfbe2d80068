"""Operations on a batch's packing metadata, and on which rank needs what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from packhorse import MicroBatch, ParallelLayout, Partition
from packhorse.adapters import megatron_bridge
from packhorse.adapters.megatron_bridge import PackedMetadata, packed_metadata, partition_offsets
from packhorse.codec.pipeline_stages import METADATA, Stage, needed
from packhorse.errors import ContractError
from tests.conformance.row_operations import equal
from tests.conformance.rows import contract_of, deliver_row, micro_batch_with, row_with
from tests.conformance.vectors import Case

OFFSETS = {"cu_seqlens", "cu_seqlens_unpadded"} | {
    f"cu_seqlens_{of}{kind}" for of in ("q", "kv") for kind in ("", "_padded")
}
# "meta" stands for any device that is not the host: nothing can be read from it here.
ELSEWHERE = "meta"


def _batch(given: Mapping[str, Any]) -> dict[str, Any]:
    """A case's input as the batch it describes: offsets and counts as tensors."""
    dtype = getattr(torch, given.get("dtype", "int32"))
    batch = dict(given)
    for name, value in given.items():
        if name in OFFSETS and value is not None:
            device = "cpu" if given.get("device", "cpu") == "cpu" else ELSEWHERE
            batch[name] = torch.tensor(value, dtype=dtype, device=device)
        elif name.endswith("argmin") and value is not None:
            device = "cpu" if given.get("argmin_device", "cpu") == "cpu" else ELSEWHERE
            batch[name] = torch.tensor(value, device=device)
        elif name.startswith("max_seqlen") and isinstance(value, list):
            batch[name] = torch.tensor(value, dtype=torch.int32)
    return batch


def normalize_packed_metadata(case: Case) -> None:
    batch = _batch(case.input)
    if case.rejects:
        with pytest.raises(ContractError):
            packed_metadata(batch)
        return
    found = packed_metadata(batch)
    for name, expected in case.expect.items():
        COMPARISONS.get(name, _compare_field)(found, name, expected)
    if "dtype" in case.input:
        assert str(found.cu_seqlens_q.dtype) == f"torch.{case.input['dtype']}"


def _compare_field(found: PackedMetadata, name: str, expected: Any) -> None:
    value = getattr(found, name)
    assert (value.tolist() if isinstance(value, torch.Tensor) else value) == expected, name


def _seq_idx_source(found: PackedMetadata, _name: str, source: str) -> None:
    offsets = found.physical if source == "padded" else found.logical
    assert found.seq_idx is not None
    assert found.seq_idx[0].bincount().tolist() == offsets.diff().tolist()


def _absent(found: PackedMetadata, _name: str, names: list[str]) -> None:
    assert not any(hasattr(found, name) for name in names)


def _attention_mask(_found: PackedMetadata, _name: str, expected: Any) -> None:
    assert megatron_bridge.batch(micro_batch_with([0, 8], [0, 8]))["attention_mask"] is expected


def _row_width(found: PackedMetadata, _name: str, expected: int) -> None:
    """The dictionary holds the whole row, however many ranks share it."""
    batch = micro_batch_with(found.logical.tolist(), found.physical.tolist())
    assert megatron_bridge.batch(batch)["tokens"].shape == (1, expected)


def _nothing(_found: PackedMetadata, _name: str, _expected: Any) -> None:
    """The outcome is compared before; a note is for people."""


COMPARISONS: Mapping[str, Callable[[PackedMetadata, str, Any], None]] = {
    "outcome": _nothing,
    "note": _nothing,
    "seq_idx_from": _seq_idx_source,
    "absent": _absent,
    "attention_mask": _attention_mask,
    "tokens_len": _row_width,
}


def select_cu_seqlens_for_partition(case: Case) -> None:
    batch = _batch(case.input)
    if case.rejects:
        with pytest.raises(ContractError):
            partition_offsets(batch)
        return
    if "partitioned" in case.expect:
        return _fields_cut(case)
    found = partition_offsets(batch)
    if "cu_seqlens" in case.expect:
        equal(found, case.expect["cu_seqlens"])
    if "attention_mask" in case.expect:
        written = megatron_bridge.batch(micro_batch_with(found.tolist(), found.tolist()))
        assert written["attention_mask"] is case.expect["attention_mask"]
    return None


def _fields_cut(case: Case) -> None:
    """What differs in length between a slice and the whole row is cut, nothing else."""
    layout = ParallelLayout(context=2)
    row = row_with([0, 3, 8], [0, 4, 12])
    whole, part = (
        deliver_row(row, contract_of(layout, seq_length=12, partition=how), layout, 0)
        for how in (Partition.WHOLE, Partition.ZIGZAG)
    )
    names = [name for name in megatron_bridge.batch(micro_batch_with([0, 8], [0, 8])) if hasattr(whole, name)]
    cut = {name for name in names if len(getattr(whole, name)) != len(getattr(part, name))}
    assert cut == set(case.expect["partitioned"])
    kept = [name for name in MicroBatch.__struct_fields__ if name not in cut]
    assert not any(fnmatchcase(name, pattern) for name in cut for pattern in case.expect["keys"])
    assert all(name in kept for name in METADATA)


# Which rank needs what -----------------------------------------------------------------------------------


def required_keys(case: Case) -> None:
    """``packed_metadata`` stands for our three fields; a remark in brackets says when a key is sent upstream.

    The padding mask follows the contract, so a case that lists it is one whose contract asks for it.
    """
    given, names = case.input, {name.split(" ")[0] for name in case.expect}
    expected = names - {"packed_metadata"} | (METADATA if "packed_metadata" in names else set())
    mask = "padding_mask" in expected
    fields = needed(
        Stage(given["stage"]), packed=given.get("packed", True), mtp=given.get("mtp", False), padding_mask=mask
    )
    if given.get("framework", "").startswith("bridge"):
        return _bridge_keys(fields, names)
    assert fields == expected
    return None


def _bridge_keys(fields: frozenset[str], names: set[str]) -> None:
    """Bridge's dictionary holds every key on every stage, ``None`` for what the stage does not use."""
    whole = micro_batch_with([0, 3, 8], [0, 4, 12])
    unused = {"tokens", "labels", "loss_mask", "position_ids"} - fields
    nothing: dict[str, Any] = dict.fromkeys(unused)
    batch = megatron_bridge.batch(replace(whole, **nothing))
    assert names - {"packed_metadata"} <= set(batch)
    assert {name for name, value in batch.items() if value is None} == unused | {"attention_mask"}
    packed_metadata(batch)
