"""All rules, in the order of the documentation, and the two questions asked of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from packhorse.contract.batch_contract import BatchContract, ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import families, lengths, loss, shapes
from packhorse.rules import training_framework as framework
from packhorse.rules.model import Case, Rule, Severity, Unchecked, Violation

__all__ = ["RULES", "check", "compare", "errors", "unchecked", "warnings"]

ERROR, WARN = Severity

RULES: tuple[Rule, ...] = (
    Rule("MBS_ONLINE", ERROR, lengths.mbs_online, applies=lengths.one_row_a_pack),
    Rule("MBS_IN_BATCH", ERROR, lengths.mbs_in_batch, applies=lengths.in_batch),
    Rule("MODES_EXCLUSIVE", ERROR, framework.modes_exclusive, tuple(framework.PACKERS)),
    Rule("CP_LENGTH", ERROR, lengths.cp_length, applies=lengths.context_parallel),
    Rule("SEGMENT_ALIGN", ERROR, lengths.segment_align),
    Rule("PACK_ALIGN", ERROR, lengths.pack_align),
    Rule("PER_TOKEN_LOSS", ERROR, loss.per_token_loss, applies=loss.fine_tunes),
    Rule(
        "NO_AVERAGE_IN_COLLECTIVE",
        ERROR,
        loss.no_average_in_collective,
        ("megatron_ddp", "average_in_collective"),
        loss.fine_tunes_across_context,
    ),
    Rule("ZERO_LOSS", ERROR, loss.zero_loss, ("clamps_zero_loss",), loss.averages_fillers),
    Rule("GBS_DIVIDES", ERROR, lengths.gbs_divides),
    Rule("CONSTANT_STEP", ERROR, lengths.constant_step, ("rampup_batch_size", "decrease_batch_size_if_needed")),
    Rule("WORLD", ERROR, lengths.world, ("world_size",)),
    Rule("SEQ_LENGTH_MATCH", ERROR, lengths.seq_length_match, ("model_seq_length", "data_seq_length")),
    Rule("MAX_POSITION", ERROR, lengths.max_position, ("max_position_embeddings",)),
    Rule("CU_SEQLENS_FIXED", ERROR, shapes.cu_seqlens_fixed, applies=shapes.pads_offsets),
    Rule("GRAPH_WIDTH", ERROR, shapes.graph_width, ("cuda_graph",), shapes.varies),
    Rule("GRAPH_ATTENTION", ERROR, shapes.graph_attention, ("cuda_graph",), framework.packed),
    Rule("MTP", ERROR, loss.mtp, ("mtp_num_layers",), loss.fine_tunes_packed),
    Rule("MODEL_FAMILY", ERROR, families.model_family, ("model_family",), framework.packed),
    Rule("THD_ROWS", ERROR, shapes.thd_rows),
    Rule("THD_BACKEND", ERROR, framework.thd_backend, ("transformer_impl",), framework.packed),
    Rule("STOCK_THD", ERROR, framework.stock_thd, ("stack",), framework.packed),
    Rule("PP_UNIFORM", ERROR, shapes.pp_uniform, ("variable_seq_lengths",), shapes.varies_across_stages),
    Rule(
        "PP_INTERLEAVE",
        ERROR,
        framework.pp_interleave,
        ("virtual_pipeline_chunks",),
        framework.pipelined,
    ),
    Rule("VARIABLE_DISPATCH", ERROR, shapes.variable_dispatch, ("moe_dispatcher",), shapes.varies),
    Rule("EP_UNIFORM", WARN, shapes.ep_uniform, ("expert_parallel",), shapes.varies),
    Rule("FP8_WIDTH", ERROR, shapes.fp8_width, ("fp8",)),
    Rule("CP_HIERARCHY", ERROR, framework.cp_hierarchy, ("cp_comm_type",), lengths.context_parallel),
    Rule("DYNAMIC_CP", ERROR, framework.dynamic_cp, ("dynamic_context_parallel",)),
    Rule("PARTITION", ERROR, framework.partition, ("stack",), framework.sliced),
    Rule("WINDOW", ERROR, framework.window, ("window",)),
    Rule("RANKS_AGREE", ERROR, framework.ranks_agree),
    Rule("KEY_RANK", ERROR, framework.key_rank),
    Rule("DTYPE_RANGE", ERROR, lengths.dtype_range),
)


def check(case: Case) -> list[Violation]:
    """Every rule that the case breaks, errors and warnings, in the order of ``RULES``."""
    return [violation for rule in RULES for violation in rule.violations(case)]


def unchecked(case: Case) -> list[Unchecked]:
    """The rules that concern the case and lack facts that nobody declared: nothing is guessed."""
    return [Unchecked(rule.id, missing) for rule in RULES if (missing := rule.missing(case))]


def errors(violations: list[Violation]) -> list[Violation]:
    """Those that refuse a handshake."""
    return [violation for violation in violations if violation.severity is Severity.ERROR]


def warnings(violations: list[Violation]) -> list[Violation]:
    """Those that are only reported."""
    return [violation for violation in violations if violation.severity is Severity.WARN]


# The rule that a difference between the two sides breaks, by field; RANKS_AGREE where none is named.
FIELD_RULES = {
    "seq_length": "SEQ_LENGTH_MATCH",
    "partition": "PARTITION",
    "segment_multiple": "SEGMENT_ALIGN",
    "pack_multiple": "PACK_ALIGN",
    "vocab_size": "DTYPE_RANGE",
    "pad_id": "DTYPE_RANGE",
    "ignore_index": "DTYPE_RANGE",
}

# A model's vocabulary may be larger than the stream's: it is padded for the kernels.
AGREES: Mapping[str, Callable[[Any, Any], bool]] = {"vocab_size": lambda got, want: got >= want}


def compare(
    declared: BatchContract, on: ParallelLayout, window: int | None, served: ResolvedContract, served_on: ParallelLayout
) -> list[Violation]:
    """All that stands between a reader and what the server serves: differences, then broken rules.

    What the reader leaves out is not compared, and the rules that need it are silent (``unchecked``).
    """
    found = [
        _difference(FIELD_RULES.get(f.name, "RANKS_AGREE"), f.name, getattr(served, f.name), getattr(declared, f.name))
        for f in fields(served)
        if not _agrees(f.name, getattr(declared, f.name), getattr(served, f.name))
    ]
    found += [
        _difference("WORLD", f"layout.{f.name}", getattr(served_on, f.name), getattr(on, f.name))
        for f in fields(on)
        if getattr(on, f.name) != getattr(served_on, f.name)
    ]
    return found + check(Case(served_on, served, declared.trainer or TrainerFacts(), window))


def _agrees(name: str, declared: Any, served: Any) -> bool:
    return declared is None or declared == served or (name in AGREES and AGREES[name](declared, served))


def _difference(rule: str, field: str, want: object, got: object) -> Violation:
    return Violation(
        rule=rule,
        severity=Severity.ERROR,
        field=field,
        want=f"{want} (the server's)",
        got=str(got),
        remedy=f"set {field} to the same value on both sides",
    )
