"""Operations on a batch's packing metadata, and on which rank needs what.

A case gives a batch as upstream's collators write it, and what upstream reads from it. Its row is delivered by our own
data path, and both are held against that: what our adapters write, and the parameters of attention that they build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from packhorse import MicroBatch, ParallelLayout, Partition
from packhorse.adapters import megatron_bridge
from packhorse.adapters.megatron_core import packed_seq_params
from packhorse.codec.pipeline_stages import METADATA, Stage, needed
from packhorse.contract.batch_contract import AttentionOffsets
from packhorse.errors import ContractError, PackhorseError
from tests.conformance.rows import contract_of, deliver_row, micro_batch_with, receive_offsets, row_with
from tests.conformance.vectors import Case

OFFSET_FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# "meta" stands for any device that is not the host: nothing can be read from it here.
ELSEWHERE = "meta"
CURRENT, LEGACY = ("cu_seqlens_q", "cu_seqlens_q_padded"), ("cu_seqlens_unpadded", "cu_seqlens")


@dataclass
class PackedParameters:
    """Megatron-Core's ``PackedSeqParams``: the fields of mid-2026."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None
    seq_idx: torch.Tensor | None = None


class GivenOffsets:
    """Offsets of a case's batch, under current or legacy keys, without the entries that only say where they end."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        logical, physical = CURRENT if "cu_seqlens_q" in given else LEGACY
        self.in_both = given.get(logical) is not None and given.get(physical) is not None
        self.logical = self._read(given, logical if given.get(logical) is not None else physical)
        self.physical = self._read(given, physical if given.get(physical) is not None else logical)

    @staticmethod
    def _read(given: Mapping[str, Any], key: str) -> list[Any]:
        entries: list[Any] = np.array(given[key]).squeeze().tolist()
        return entries[: entries.index(-1)] if -1 in entries else entries

    @property
    def spelled(self) -> AttentionOffsets:
        """Choice of offsets with which our adapters write such a batch."""
        return AttentionOffsets.LOGICAL if self.in_both else AttentionOffsets.PHYSICAL

    @property
    def several_rows(self) -> bool:
        return any(isinstance(entry, list) for entry in self.physical)


def delivered(offsets: GivenOffsets, *, slots: int | None = None) -> MicroBatch:
    """Deliver the row of a case; slots behind its last offset are a tail that is a segment of its own."""
    logical, physical = list(offsets.logical), list(offsets.physical)
    if slots is not None and slots > physical[-1]:
        logical, physical = [*logical, logical[-1]], [*physical, slots]
    return micro_batch_with(logical, physical)


def stacked(offsets: GivenOffsets) -> MicroBatch:
    """Micro-batches stacked to one, as a loop of one's own might do."""
    tensor = torch.tensor(offsets.physical, dtype=torch.int32)
    return replace(micro_batch_with([0, 8], [0, 8]), cu_seqlens=tensor, cu_seqlens_padded=tensor)


def refuse_rows(offsets: GivenOffsets) -> None:
    for write in (megatron_bridge.batch, megatron_bridge.legacy_batch):
        with pytest.raises(ContractError, match="THD_ROWS"):
            write(stacked(offsets))


def normalize_packed_metadata(case: Case) -> None:
    given, expect = case.input, case.expect
    if "max_seqlen_q" in given and isinstance(given["max_seqlen_q"], list):
        assert case.rejects  # several numbers, where a row has one
        assert megatron_bridge.batch(micro_batch_with([0, 8], [0, 8]))["max_seqlen_q"].dim() == 0
        return
    offsets = GivenOffsets(given)
    if not offsets.physical:
        return _offsets_of_nothing()
    row = delivered(offsets, slots=given.get("total_tokens"))
    _compare_written(offsets, row, given)
    if given.get("max_seqlen_q", given.get("max_seqlen")) is not None:
        row = replace(row, max_seqlen=expect.get("max_seqlen_q", row.max_seqlen))  # handed on, not worked out again
    params = packed_seq_params(row, attention_offsets=offsets.spelled, cls=PackedParameters)
    for name, expected in expect.items():
        COMPARISONS.get(name, _compare_field)(params, name, expected)
    return None


def _offsets_of_nothing() -> None:
    """A row has slots: a stage that receives offsets without any refuses them."""
    with pytest.raises(PackhorseError):
        receive_offsets(np.zeros(0, np.int32), 8, ParallelLayout(), 0)


def _compare_written(offsets: GivenOffsets, row: MicroBatch, given: Mapping[str, Any]) -> None:
    """Batches that our adapters write hold the case's offsets, and say where legacy ones end."""
    count = len(offsets.physical)
    current = megatron_bridge.batch(row, attention_offsets=offsets.spelled)
    legacy = megatron_bridge.legacy_batch(row, attention_offsets=offsets.spelled)
    assert current["cu_seqlens_q"].tolist()[:count] == offsets.logical
    assert ("cu_seqlens_q_padded" in current) == ("cu_seqlens_unpadded" in legacy) == offsets.in_both
    assert current.get("cu_seqlens_q_padded", current["cu_seqlens_q"]).tolist()[:count] == offsets.physical
    for key, wanted in zip(LEGACY, (offsets.logical, offsets.physical), strict=True):
        if key in legacy:
            end = int(legacy[f"{key}_argmin"])
            assert legacy[key][0, :end].tolist()[:count] == wanted
            assert legacy[key][0, end:].tolist() == [-1]
    if "total_tokens" in given:
        assert current["total_tokens"] == legacy["total_tokens"] == given["total_tokens"]


def _compare_field(params: PackedParameters, name: str, expected: Any) -> None:
    value = getattr(params, name)
    if expected is None and name.endswith("_padded"):
        assert value is params.cu_seqlens_q  # one object in every field says the same: nothing between segments
    elif name in OFFSET_FIELDS:
        assert value.tolist()[: len(expected)] == expected, name
    elif expected is not None:  # ours always says how long and how wide a row is
        assert (value.tolist() if isinstance(value, torch.Tensor) else value) == expected, name


def _logical(params: PackedParameters, _name: str, expected: list[int]) -> None:
    assert params.cu_seqlens_q is not None
    assert params.cu_seqlens_q.tolist() == expected


def _physical(params: PackedParameters, _name: str, expected: list[int]) -> None:
    assert params.cu_seqlens_q_padded is not None
    assert params.cu_seqlens_q_padded.tolist() == expected


def _seq_idx_source(params: PackedParameters, _name: str, source: str) -> None:
    offsets = params.cu_seqlens_q_padded if source == "padded" else params.cu_seqlens_q
    assert offsets is not None
    assert params.seq_idx is not None
    assert params.seq_idx[0].bincount().tolist() == offsets.diff().tolist()


def _absent(params: PackedParameters, _name: str, names: list[str]) -> None:
    assert not any(hasattr(params, name) for name in names)


def _attention_mask(_params: PackedParameters, _name: str, expected: Any) -> None:
    assert megatron_bridge.batch(micro_batch_with([0, 8], [0, 8]))["attention_mask"] is expected


def _row_width(params: PackedParameters, _name: str, expected: int) -> None:
    """The row is whole, however many ranks share it."""
    assert params.total_tokens == expected


def _nothing(_params: PackedParameters, _name: str, _expected: Any) -> None:
    """The outcome is compared before; a note is for people."""


COMPARISONS: Mapping[str, Callable[[PackedParameters, str, Any], None]] = {
    "outcome": _nothing,
    "note": _nothing,
    "logical": _logical,
    "physical": _physical,
    "seq_idx_from": _seq_idx_source,
    "absent": _absent,
    "attention_mask": _attention_mask,
    "tokens_len": _row_width,
}


def select_cu_seqlens_for_partition(case: Case) -> None:
    if "partitioned" in case.expect:
        return _fields_cut(case)
    offsets = GivenOffsets(case.input)
    if offsets.several_rows:
        assert case.rejects
        return refuse_rows(offsets)
    row = stacked(offsets)  # the adapters hand on what they are given: whose offsets they are is the stream's affair
    if case.rejects:
        return _ends_on_the_host(row)
    batch = megatron_bridge.legacy_batch(row)
    assert batch["cu_seqlens"][0, : int(batch["cu_seqlens_argmin"])].tolist() == offsets.physical
    assert "attention_mask" not in case.expect or batch["attention_mask"] is case.expect["attention_mask"]
    if "cu_seqlens" in case.expect:
        assert offsets.physical == case.expect["cu_seqlens"]
    return None


def _ends_on_the_host(row: MicroBatch) -> None:
    """Upstream refuses offsets on a device whose end it would have to wait for: ours say it on the host."""
    assert row.cu_seqlens_padded is not None
    away: Any = torch.as_tensor(row.cu_seqlens_padded).to(ELSEWHERE)
    batch = megatron_bridge.legacy_batch(replace(row, cu_seqlens_padded=away))
    assert batch["cu_seqlens"].device.type == ELSEWHERE
    assert batch["cu_seqlens_argmin"].device.type == "cpu"


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
    assert all(batch[name] is not None for name in ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"))
