"""Adapters rename and nothing else: field lists of versions that cannot be installed stand in as dataclasses.

Transformer Engine, FlashAttention and Megatron-Bridge's own steps are not run on a GPU here.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from packhorse import MicroBatch, Packing, ParallelLayout, Partition
from packhorse.adapters import megatron_bridge, megatron_lm, varlen
from packhorse.adapters.megatron_core import packed_seq_params
from packhorse.contract.batch_contract import AttentionOffsets
from packhorse.errors import ConfigError, ContractError
from packhorse.feeding.torch_arrays import to_torch
from tests.conformance.rows import contract_of, deliver_row, micro_batch_with, row_with

LOGICAL, PHYSICAL = [0, 3, 8, 8], [0, 4, 12, 16]
OFFSET_FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass
class Params0161:
    """The fields of megatron-core 0.16.1."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None


@dataclass
class ParamsWithTotal(Params0161):
    """Later: state-space layers."""

    total_tokens: int | None = None
    seq_idx: torch.Tensor | None = None


@dataclass
class ParamsWithFlag(ParamsWithTotal):
    """Main, August 2026, and the partition mode of the dev branch."""

    pad_between_seqs: bool | None = None
    cp_partition_mode: str = "zigzag"


VERSIONS = (Params0161, ParamsWithTotal, ParamsWithFlag)


@pytest.fixture
def packed() -> MicroBatch:
    """Segments of 3 and 5 slots in 4 and 8, and a tail of 4."""
    return micro_batch_with(LOGICAL, PHYSICAL)


@pytest.fixture
def dense() -> MicroBatch:
    """Two rows of 8 slots, 3 and 5 of them real."""
    contract = contract_of(seq_length=8, packing=Packing.NONE, micro_batch_size=2)
    return to_torch(deliver_row(row_with([0, 3, 8], [0, 8, 16]), contract, ParallelLayout(), 0), pin=False)


def slice_of_a_row(partition: Partition) -> MicroBatch:
    layout = ParallelLayout(context=2)
    contract = contract_of(layout, seq_length=16, partition=partition)
    return to_torch(deliver_row(row_with(LOGICAL, PHYSICAL), contract, layout, 0), pin=False)


# Megatron-Core -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_physical_offsets_are_one_object_in_every_field_and_no_flag_is_set(version: type, packed: MicroBatch) -> None:
    params = packed_seq_params(packed, cls=version)
    assert {id(getattr(params, name)) for name in OFFSET_FIELDS} == {id(packed.cu_seqlens_padded)}
    assert params.cu_seqlens_q.dtype == torch.int32
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.qkv_format) == (8, 8, "thd")
    assert type(params.max_seqlen_q) is int
    assert getattr(params, "pad_between_seqs", None) is None
    assert getattr(params, "total_tokens", 16) == 16


@pytest.mark.parametrize("version", VERSIONS)
def test_logical_offsets_come_with_padded_ones_and_the_flag_where_there_is_one(
    version: type, packed: MicroBatch
) -> None:
    params = packed_seq_params(packed, attention_offsets=AttentionOffsets.LOGICAL, cls=version)
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == LOGICAL
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == PHYSICAL
    assert getattr(params, "pad_between_seqs", True) is True


@pytest.mark.parametrize("offsets", list(AttentionOffsets))
def test_the_flag_never_follows_what_a_micro_batch_holds(offsets: AttentionOffsets, packed: MicroBatch) -> None:
    unpadded = micro_batch_with([0, 4, 12], [0, 4, 12])
    flags = {
        packed_seq_params(batch, attention_offsets=offsets, cls=ParamsWithFlag).pad_between_seqs
        for batch in (packed, unpadded)
    }
    assert len(flags) == 1
    keys = [set(megatron_bridge.batch(batch, attention_offsets=offsets)) for batch in (packed, unpadded)]
    assert keys[0] == keys[1]


def test_a_model_with_state_space_layers_needs_a_version_that_resets_their_state(packed: MicroBatch) -> None:
    with pytest.raises(ContractError, match="total_tokens"):
        packed_seq_params(packed, state_space=True, cls=Params0161)
    params = packed_seq_params(packed, state_space=True, cls=ParamsWithTotal)
    assert params.total_tokens == 16
    assert params.seq_idx.tolist() == [[0] * 4 + [1] * 8 + [2] * 4]
    assert packed_seq_params(packed, state_space=False, cls=ParamsWithTotal).total_tokens is None


@pytest.mark.parametrize("partition", [Partition.ZIGZAG, Partition.CONTIGUOUS])
def test_a_slice_keeps_the_offsets_of_the_whole_row_and_says_how_it_was_cut(partition: Partition) -> None:
    params = packed_seq_params(slice_of_a_row(partition), cls=ParamsWithFlag)
    assert params.cu_seqlens_q.tolist() == PHYSICAL
    assert params.total_tokens == 16
    assert params.cp_partition_mode == partition


def test_the_choice_of_offsets_may_be_a_word_of_a_configuration_file(packed: MicroBatch) -> None:
    logical: Any = "logical"
    assert packed_seq_params(packed, attention_offsets=logical, cls=Params0161).cu_seqlens_q.tolist() == LOGICAL
    with pytest.raises(ValueError, match="both"):
        packed_seq_params(packed, attention_offsets=logical.replace("logical", "both"), cls=Params0161)


def test_dense_micro_batches_have_no_parameters(dense: MicroBatch) -> None:
    assert packed_seq_params(dense, cls=Params0161) is None


def test_without_megatron_core_the_error_says_what_to_install(packed: MicroBatch, monkeypatch: Any) -> None:
    for name in ("megatron", "megatron.core", "megatron.core.packed_seq_params"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="install megatron-core"):
        packed_seq_params(packed)


def test_the_installed_megatron_core_takes_the_parameters(packed: MicroBatch) -> None:
    module = pytest.importorskip("megatron.core.packed_seq_params")
    params = packed_seq_params(packed)
    assert isinstance(params, module.PackedSeqParams)
    assert {f.name for f in fields(Params0161)} <= {f.name for f in fields(module.PackedSeqParams)}
    assert params.cu_seqlens_q is params.cu_seqlens_kv_padded


# Megatron-Bridge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", list(AttentionOffsets))
def test_both_spellings_say_the_same_of_a_row(offsets: AttentionOffsets, packed: MicroBatch) -> None:
    current = megatron_bridge.batch(packed, attention_offsets=offsets)
    legacy = megatron_bridge.legacy_batch(packed, attention_offsets=offsets)
    logical = offsets is AttentionOffsets.LOGICAL
    assert current["cu_seqlens_q"].tolist() == current["cu_seqlens_kv"].tolist() == (LOGICAL if logical else PHYSICAL)
    assert legacy["cu_seqlens"][0, : int(legacy["cu_seqlens_argmin"])].tolist() == PHYSICAL
    assert ("cu_seqlens_q_padded" in current) == ("cu_seqlens_unpadded" in legacy) == logical
    if logical:
        assert current["cu_seqlens_q_padded"].tolist() == current["cu_seqlens_kv_padded"].tolist() == PHYSICAL
        assert legacy["cu_seqlens_unpadded"][0, : int(legacy["cu_seqlens_unpadded_argmin"])].tolist() == LOGICAL
    assert int(current["max_seqlen_q"]) == int(current["max_seqlen_kv"]) == int(legacy["max_seqlen"]) == 8
    assert current["total_tokens"] == legacy["total_tokens"] == 16


@pytest.mark.parametrize("write", [megatron_bridge.batch, megatron_bridge.legacy_batch])
def test_rows_have_a_batch_dimension_and_attention_has_no_mask(write: Any, packed: MicroBatch) -> None:
    batch = write(packed)
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        assert batch[name].shape == (1, 16)
        assert batch[name][0].tolist() == getattr(packed, name).tolist()
    assert batch["attention_mask"] is None
    assert "total_tokens" not in write(packed, state_space=False)


def test_legacy_offsets_end_in_one_sentinel_and_say_where_on_the_host(packed: MicroBatch) -> None:
    batch = megatron_bridge.legacy_batch(packed)
    assert batch["cu_seqlens"].tolist() == [[*PHYSICAL, -1]]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens_argmin"].tolist() == [[4]]
    assert batch["cu_seqlens_argmin"].dtype == torch.int64
    assert batch["max_seqlen"].tolist() == [[8]]
    assert "cu_seqlens_unpadded" not in batch


@pytest.mark.parametrize("write", [megatron_bridge.batch, megatron_bridge.legacy_batch])
@pytest.mark.parametrize("partition", [Partition.ZIGZAG, Partition.CONTIGUOUS])
def test_a_slice_is_refused_as_the_step_would_cut_it_again(write: Any, partition: Partition) -> None:
    with pytest.raises(ContractError, match="cut twice"):
        write(slice_of_a_row(partition))


def test_a_stage_without_tokens_has_every_key_and_all_metadata(packed: MicroBatch) -> None:
    middle = replace(packed, tokens=None, labels=None, loss_mask=None, position_ids=None)
    batch = megatron_bridge.batch(middle)
    assert [batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids")] == [None] * 4
    assert batch["cu_seqlens_q"].tolist() == PHYSICAL
    assert batch["padding_mask"].shape == (1, 16)


def test_dense_batches_keep_their_rows_and_have_no_offsets(dense: MicroBatch) -> None:
    batch = megatron_bridge.batch(dense)
    assert batch["tokens"].shape == (2, 8)
    assert not [name for name in batch if name.startswith(("cu_seqlens", "max_seqlen", "total"))]


# Offsets of several rows -----------------------------------------------------------------------------------

WRITERS = (
    megatron_bridge.batch,
    megatron_bridge.legacy_batch,
    megatron_lm.batch,
    partial(packed_seq_params, cls=Params0161),
    varlen.flash_attention_arguments,
    varlen.torch_varlen_arguments,
)


def with_offsets(shape: tuple[int, ...], packed: MicroBatch) -> MicroBatch:
    """A micro-batch whose offsets have these dimensions, as those that are stacked have."""
    offsets: Any = torch.tensor(PHYSICAL, dtype=torch.int32).expand(shape)
    return replace(packed, cu_seqlens=offsets, cu_seqlens_padded=offsets, padding_mask=None)


@pytest.mark.parametrize("write", WRITERS)
def test_one_row_of_offsets_is_taken_with_its_batch_dimension_too(write: Any, packed: MicroBatch) -> None:
    written = write(with_offsets((1, 4), packed))
    values = written.values() if isinstance(written, dict) else vars(written).values()
    assert any(torch.is_tensor(value) and value.flatten()[:4].tolist() == PHYSICAL for value in values)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 4)])
def test_offsets_of_two_rows_are_refused_by_name(write: Any, shape: tuple[int, ...], packed: MicroBatch) -> None:
    with pytest.raises(ContractError, match=r"THD_ROWS: offsets of 2 rows.*set micro_batch_size to 1"):
        write(with_offsets(shape, packed))


# Variable-length attention and state-space layers --------------------------------------------------------

FLASH_ATTENTION_2 = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
TORCH_VARLEN = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")


@pytest.mark.parametrize(
    ("arguments", "signature"),
    [(varlen.flash_attention_arguments, FLASH_ATTENTION_2), (varlen.torch_varlen_arguments, TORCH_VARLEN)],
)
def test_kernels_get_physical_offsets_under_their_own_names(
    arguments: Any, signature: tuple[str, ...], packed: MicroBatch
) -> None:
    given = arguments(packed)
    assert tuple(given) == signature[3:]
    values = list(given.values())
    assert [offsets.tolist() for offsets in values[:2]] == [PHYSICAL, PHYSICAL]
    assert values[0].dtype == torch.int32
    assert values[2:] == [8, 8]


def test_the_installed_torch_has_the_names_of_its_kernel() -> None:
    module = pytest.importorskip("torch.nn.attention.varlen")
    assert set(TORCH_VARLEN) <= set(inspect.signature(module.varlen_attn).parameters)


@pytest.mark.parametrize("arguments", [varlen.flash_attention_arguments, varlen.torch_varlen_arguments])
def test_kernels_without_context_parallelism_refuse_a_slice_and_dense_rows(arguments: Any, dense: MicroBatch) -> None:
    with pytest.raises(ContractError, match="whole row"):
        arguments(slice_of_a_row(Partition.ZIGZAG))
    with pytest.raises(ContractError, match="dense"):
        arguments(dense)


def test_segment_numbers_skip_empty_segments_and_count_the_rest_as_one_more() -> None:
    numbers = varlen.seq_idx(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert numbers.tolist() == [0, 0, 2, 2, 2, 3, 3]
    assert numbers.dtype == torch.int32


def _plain(logical: list[int], physical: list[int]) -> MicroBatch:
    """A row of a contract that asks for no padding mask."""
    return replace(micro_batch_with(logical, physical), padding_mask=None)


class TestMegatronLM:
    """The dictionary of Megatron-LM's own ``get_batch``; its broadcast is run in ``tests/models``."""

    def test_rows_have_one_dimension_more_and_offsets_are_physical(self) -> None:
        micro_batch = _plain(LOGICAL, PHYSICAL)
        batch = megatron_lm.batch(micro_batch)
        assert batch["cu_seqlens"].tolist() == [PHYSICAL]
        assert batch["cu_seqlens"].dtype is batch["max_seqlen"].dtype is torch.int32
        assert batch["max_seqlen"].tolist() == [micro_batch.max_seqlen]
        assert batch["cu_seqlens_padded"] is batch["attention_mask"] is None
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert torch.equal(batch[name], getattr(micro_batch, name)[None])

    def test_segments_of_no_slots_are_left_out(self) -> None:
        filled = _plain([0, 3, 8, 8, 8], [0, 4, 16, 16, 16])
        assert megatron_lm.batch(filled)["cu_seqlens"].tolist() == [[0, 4, 16]]

    def test_a_stage_has_what_it_uses_and_offsets_always(self) -> None:
        nothing: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
        middle = megatron_lm.batch(replace(_plain(LOGICAL, PHYSICAL), **nothing))
        assert {name for name, value in middle.items() if value is not None} == {"cu_seqlens", "max_seqlen"}

    def test_dense_rows_have_no_offsets(self) -> None:
        dense = replace(_plain(LOGICAL, PHYSICAL), cu_seqlens=None, cu_seqlens_padded=None)
        assert "cu_seqlens" not in megatron_lm.batch(dense)

    def test_what_that_step_would_cut_twice_or_leave_out_is_refused(self) -> None:
        whole = _plain(LOGICAL, PHYSICAL)
        with pytest.raises(ContractError, match="set partition to whole"):
            megatron_lm.batch(replace(whole, partition=Partition.ZIGZAG, context_size=2))
        with pytest.raises(ContractError, match="set padding_mask to false"):
            megatron_lm.batch(replace(whole, padding_mask=torch.zeros(16, dtype=torch.bool)))
