"""A contract is declared in part, resolved in full, and named by its digest."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.batch_contract import (
    AttentionOffsets,
    BatchContract,
    LossReduction,
    Objective,
    Packing,
    ReaderPolicy,
    Remainder,
    ResolvedContract,
    TailPadding,
    resolve,
)
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.errors import ConfigError
from tests.strategies import declared_contracts, layouts, resolved_contracts

LENGTHS: dict[str, int] = {"seq_length": 4096, "global_batch_size": 8, "vocab_size": 50_000}


def as_declaration(contract: ResolvedContract) -> BatchContract:
    return BatchContract(**{f.name: getattr(contract, f.name) for f in fields(contract)})


def test_declared_and_resolved_contracts_have_the_same_fields_but_for_the_trainers_facts() -> None:
    declared = [f.name for f in fields(BatchContract)]
    assert declared == [*(f.name for f in fields(ResolvedContract)), "trainer"]


def test_nothing_is_declared_by_default() -> None:
    assert {getattr(BatchContract(), f.name) for f in fields(BatchContract)} == {None}


def test_what_is_left_open_is_resolved_to_these_defaults() -> None:
    assert resolve(BatchContract(), ParallelLayout(), **LENGTHS) == ResolvedContract(
        seq_length=4096,
        micro_batch_size=1,
        global_batch_size=8,
        packing=Packing.ONLINE,
        isolate_documents=True,
        partition=Partition.WHOLE,
        readers=ReaderPolicy.ALL,
        evaluation_context=1,
        segment_multiple=1,
        pack_multiple=1,
        static_shapes=False,
        pad_to_max_length=True,
        pad_cu_seqlens=False,
        max_segments=None,
        tail_padding=TailPadding.OWN_SEGMENT,
        objective=Objective.SFT,
        loss_reduction=LossReduction.STEP_TOKENS,
        remainder=Remainder.PAD,
        attention_offsets=AttentionOffsets.PHYSICAL,
        padding_mask=False,
        vocab_size=50_000,
        pad_id=0,
        ignore_index=-100,
    )


@given(layout=layouts(), data=st.data())
def test_resolving_a_full_declaration_changes_nothing(layout: ParallelLayout, data: st.DataObject) -> None:
    contract = data.draw(resolved_contracts(layout))
    lengths = {name: getattr(contract, name) for name in LENGTHS}
    assert resolve(as_declaration(contract), layout, **lengths) == contract


def test_rows_have_their_own_width_in_batch_and_static_shapes_fix_width_and_offsets() -> None:
    in_batch = resolve(BatchContract(packing=Packing.IN_BATCH), ParallelLayout(), **LENGTHS)
    assert (in_batch.pad_to_max_length, in_batch.pad_cu_seqlens) == (False, False)
    declared = BatchContract(packing=Packing.IN_BATCH, static_shapes=True)
    static = resolve(declared, ParallelLayout(), **LENGTHS)
    assert (static.pad_to_max_length, static.pad_cu_seqlens) == (True, True)
    kept = resolve(replace(declared, pad_to_max_length=False, pad_cu_seqlens=False), ParallelLayout(), **LENGTHS)
    assert (kept.pad_to_max_length, kept.pad_cu_seqlens) == (False, False), "what is declared is not decided over"


@given(layout=layouts(), evaluation_context=st.integers(1, 4), declared=st.none() | st.integers(1, 12))
def test_a_row_is_wide_enough_for_sequence_parallelism_of_training_and_evaluation(
    layout: ParallelLayout, evaluation_context: int, declared: int | None
) -> None:
    contract = resolve(BatchContract(pack_multiple=declared, evaluation_context=evaluation_context), layout, **LENGTHS)
    needed = [layout.context * layout.tensor, evaluation_context * layout.tensor] if layout.sequence_parallel else []
    assert contract.pack_multiple == math.lcm(declared or 1, *(needed if layout.tensor > 1 else []))


@given(layout=layouts(), partition=st.none() | st.sampled_from(Partition))
def test_alignment_defaults_to_the_rule_of_megatron_bridge(layout: ParallelLayout, partition: Partition | None) -> None:
    contract = resolve(BatchContract(partition=partition), layout, **LENGTHS)
    context, tensor = layout.context, layout.tensor
    cut = 1 if context == 1 else context if partition is Partition.CONTIGUOUS else 2 * context
    sequence_parallel = context * tensor if layout.sequence_parallel and tensor > 1 else 1
    assert contract.segment_multiple == math.lcm(cut, sequence_parallel)
    assert contract.pack_multiple == sequence_parallel
    assert contract.row_multiple == math.lcm(contract.segment_multiple, contract.pack_multiple)


@given(layout=layouts(), data=st.data())
def test_every_rank_has_the_same_number_of_micro_batches(layout: ParallelLayout, data: st.DataObject) -> None:
    contract = data.draw(resolved_contracts(layout))
    assert contract.num_microbatches(layout) * layout.data == contract.global_batch_size


def test_choices_may_be_given_as_text() -> None:
    declared = BatchContract(partition="zigzag", remainder="drop", objective="pretrain")  # type: ignore[arg-type]
    assert declared == BatchContract(partition=Partition.ZIGZAG, remainder=Remainder.DROP, objective=Objective.PRETRAIN)
    assert isinstance(declared.partition, Partition)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packing", "offline"),
        ("readers", "some"),
        ("attention_offsets", "both"),
        ("partition", "Zigzag"),
        ("tail_padding", ""),
        ("objective", "rl"),
        ("loss_reduction", "sum"),
        ("remainder", "keep"),
        ("remainder", 1),
        *((name, value) for name in ("seq_length", "vocab_size") for value in (0, -1, 8.0, "8", True)),
        ("micro_batch_size", 0),
        ("global_batch_size", 0),
        ("segment_multiple", 0),
        ("pack_multiple", 0),
        ("evaluation_context", 0),
        ("max_segments", 0),
        ("pad_id", "0"),
        ("pad_id", 1.5),
        ("pad_id", True),
        ("ignore_index", "-100"),
        ("pad_to_max_length", 1),
        ("pad_to_max_length", "yes"),
        *((name, 1) for name in ("isolate_documents", "static_shapes", "pad_cu_seqlens", "padding_mask")),
    ],
)
def test_a_value_that_cannot_be_is_refused_where_it_is_declared(field: str, value: object) -> None:
    """The server would refuse it as a malformed HELLO, far from the mistake."""
    declared: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=rf"contract\.{field}={value!r}"):
        BatchContract(**declared)


@given(declared_contracts(), declared_contracts(), layouts(), layouts())
def test_digests_are_equal_where_contract_and_layout_are(
    one: BatchContract, other: BatchContract, on: ParallelLayout, other_on: ParallelLayout
) -> None:
    assert len(one.digest(on)) == 16
    assert one.digest(on) == replace(one).digest(replace(on))
    assert (one.digest(on) == other.digest(other_on)) == ((one, on) == (other, other_on))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_length", 4096),
        ("packing", Packing.ONLINE),
        ("partition", Partition.ZIGZAG),
        ("pad_to_max_length", False),
        ("pad_id", 0),
        ("ignore_index", -100),
        ("isolate_documents", False),
        ("readers", ReaderPolicy.ALL),
        ("evaluation_context", 1),
        ("static_shapes", False),
        ("pad_cu_seqlens", False),
        ("max_segments", 1),
        ("attention_offsets", AttentionOffsets.PHYSICAL),
        ("padding_mask", False),
        ("trainer", TrainerFacts(stack=Stack.OWN)),
    ],
)
def test_declaring_one_field_more_changes_the_digest(field: str, value: object) -> None:
    declared: dict[str, Any] = {field: value}
    assert BatchContract(**declared).digest(ParallelLayout()) != BatchContract().digest(ParallelLayout())


def test_the_digest_does_not_change_between_releases() -> None:
    declared = BatchContract(seq_length=4096, partition=Partition.ZIGZAG, pad_to_max_length=True, ignore_index=-100)
    assert declared.digest(ParallelLayout(data=2, context=2)).hex() == "b2bafcaa6fea924c5141d16d03561a06"
