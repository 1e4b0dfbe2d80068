"""Conditions under which a rule concerns a stream at all: told from layout, contract and the trainer's stack."""

from __future__ import annotations

from packhorse.contract.batch_contract import (
    AttentionOffsets,
    LossReduction,
    Objective,
    Packing,
    Remainder,
    TailPadding,
)
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import Stack
from packhorse.rules.model import RuleInput

__all__ = [
    "averages_fillers",
    "context_parallel",
    "dense_in_megatron_lm",
    "fine_tunes",
    "fine_tunes_across_context",
    "has_middle_stages",
    "in_batch",
    "in_megatron_lm",
    "interleaves_or_may",
    "masks_padding_in_bridge",
    "may_hold_empty_segments",
    "one_row_a_pack",
    "packed",
    "packed_in_bridge",
    "pads_offsets",
    "pipelined",
    "reduces_over_tokens",
    "sliced",
    "varies",
    "varies_across_stages",
    "varies_or_announces",
]


def packed(given: RuleInput) -> bool:
    """Return whether rows hold several segments."""
    return given.contract.packed


def one_row_a_pack(given: RuleInput) -> bool:
    """Return whether a micro-batch is one pack: ``online``, and ``concat`` with isolated documents."""
    return given.contract.packed and not in_batch(given)


def in_batch(given: RuleInput) -> bool:
    """Return whether the samples of a micro-batch are flattened to one row."""
    return given.contract.packing is Packing.IN_BATCH


def context_parallel(given: RuleInput) -> bool:
    """Return whether several ranks share a row: CP > 1."""
    return given.layout.context > 1


def sliced(given: RuleInput) -> bool:
    """Return whether the server cuts rows for the context-parallel ranks."""
    return context_parallel(given) and given.contract.partition is not Partition.WHOLE


def pipelined(given: RuleInput) -> bool:
    """Return whether the model has several pipeline stages: PP > 1."""
    return given.layout.pipeline > 1


def varies(given: RuleInput) -> bool:
    """Return whether rows differ in width; dense rows never do."""
    return given.contract.packed and not given.contract.fixed_width


def varies_across_stages(given: RuleInput) -> bool:
    """Return whether pipeline stages exchange rows that differ in width."""
    return varies(given) and pipelined(given)


def pads_offsets(given: RuleInput) -> bool:
    """Return whether packed rows come with a fixed number of offsets."""
    return given.contract.packed and given.contract.pad_cu_seqlens


def has_middle_stages(given: RuleInput) -> bool:
    """Return whether packed rows pass pipeline stages, or model chunks, that are neither first nor last."""
    chunks = given.layout.pipeline * (given.trainer.virtual_pipeline_chunks or 1)
    return packed(given) and pipelined(given) and chunks > 2


def may_hold_empty_segments(given: RuleInput) -> bool:
    """Return whether offsets of packed rows may give a segment no length.

    Offsets of a fixed number are filled up with such, and a tail that is a segment of its own has no logical length.
    """
    contract = given.contract
    tail = contract.tail_padding is TailPadding.OWN_SEGMENT and (
        contract.fixed_width or contract.row_multiple != contract.segment_multiple
    )
    logical = contract.attention_offsets is AttentionOffsets.LOGICAL
    return packed(given) and (contract.pad_cu_seqlens or (logical and tail))


def fine_tunes(given: RuleInput) -> bool:
    """Return whether the job trains on supervised targets only."""
    return given.contract.objective is Objective.SFT


def fine_tunes_across_context(given: RuleInput) -> bool:
    """Return whether a rank of a fine-tuning job sees only a slice of each row."""
    return fine_tunes(given) and context_parallel(given)


def reduces_over_tokens(given: RuleInput) -> bool:
    """Return whether the loss is a sum over tokens that is divided once: per token, or across a sliced row."""
    return given.contract.loss_reduction is LossReduction.PER_TOKEN or fine_tunes_across_context(given)


def in_megatron_lm(given: RuleInput) -> bool:
    """Return whether the step that consumes the rows is one of Megatron-LM."""
    return given.trainer.stack is Stack.MEGATRON_LM


def dense_in_megatron_lm(given: RuleInput) -> bool:
    """Return whether Megatron-LM gets dense rows."""
    return in_megatron_lm(given) and not packed(given)


def packed_in_bridge(given: RuleInput) -> bool:
    """Return whether Megatron-Bridge gets packed rows."""
    return given.trainer.stack is Stack.MEGATRON_BRIDGE and packed(given)


def masks_padding_in_bridge(given: RuleInput) -> bool:
    """Return whether Megatron-Bridge gets packed rows with a mask of their padding."""
    return packed_in_bridge(given) and given.contract.padding_mask


def interleaves_or_may(given: RuleInput) -> bool:
    """Return whether virtual stages concern the job: it is pipelined, or Megatron-LM refuses them at PP 1."""
    return pipelined(given) or in_megatron_lm(given)


def varies_or_announces(given: RuleInput) -> bool:
    """Return whether rows differ in width, or Megatron-LM is told that they might."""
    return varies(given) or (in_megatron_lm(given) and bool(given.trainer.variable_seq_lengths))


def averages_fillers(given: RuleInput) -> bool:
    """Return whether the trainer averages micro-batches of which some may hold no supervised token."""
    contract = given.contract
    return contract.loss_reduction is LossReduction.MEAN and contract.remainder is Remainder.PAD
