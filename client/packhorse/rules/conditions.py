"""Conditions under which a rule concerns a stream at all: told from its layout and contract alone."""

from __future__ import annotations

from packhorse.contract.batch_contract import LossReduction, Objective, Packing, Remainder
from packhorse.contract.partition import Partition
from packhorse.rules.model import RuleInput

__all__ = [
    "averages_fillers",
    "context_parallel",
    "fine_tunes",
    "fine_tunes_across_context",
    "fine_tunes_packed",
    "in_batch",
    "one_row_a_pack",
    "packed",
    "pads_offsets",
    "pipelined",
    "sliced",
    "varies",
    "varies_across_stages",
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


def fine_tunes(given: RuleInput) -> bool:
    """Return whether the job trains on supervised targets only."""
    return given.contract.objective is Objective.SFT


def fine_tunes_across_context(given: RuleInput) -> bool:
    """Return whether a rank of a fine-tuning job sees only a slice of each row."""
    return fine_tunes(given) and context_parallel(given)


def fine_tunes_packed(given: RuleInput) -> bool:
    """Return whether a fine-tuning job gets packed rows."""
    return fine_tunes(given) and packed(given)


def averages_fillers(given: RuleInput) -> bool:
    """Return whether the trainer averages micro-batches of which some may hold no supervised token."""
    contract = given.contract
    return contract.loss_reduction is LossReduction.MEAN and contract.remainder is Remainder.PAD
