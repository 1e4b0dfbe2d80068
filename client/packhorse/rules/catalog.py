"""All rules about what is declared, in the order of the documentation, and the questions asked of them."""

from __future__ import annotations

from packhorse.rules import conditions, families, graphs, lengths, loss, precision, shapes
from packhorse.rules import training_framework as framework
from packhorse.rules.model import Rule, RuleInput, Severity, Unchecked, Violation
from packhorse.rules.stack_versions import StackVersions

__all__ = ["RULES", "check", "errors", "unchecked", "warnings"]

BRIDGE, MEGATRON = (StackVersions.BRIDGE,), (StackVersions.MEGATRON,)
BOTH = BRIDGE + MEGATRON
TRANSFORMER_ENGINE = (StackVersions.TRANSFORMER_ENGINE,)

RULES: tuple[Rule, ...] = (
    Rule(id="MBS_ONLINE", check=lengths.mbs_online, applies=conditions.one_row_a_pack, held_against=BRIDGE),
    Rule(id="MBS_IN_BATCH", check=lengths.mbs_in_batch, applies=conditions.in_batch, held_against=BRIDGE),
    Rule(id="MODES_EXCLUSIVE", check=framework.modes_exclusive, needs=tuple(framework.PACKERS), held_against=BRIDGE),
    Rule(
        id="PACKED_STEP",
        check=framework.packed_step,
        needs=("forward_step",),
        applies=conditions.packed_in_bridge,
        held_against=BRIDGE,
    ),
    Rule(id="CP_LENGTH", check=lengths.cp_length, applies=conditions.context_parallel, held_against=BOTH),
    Rule(id="SEGMENT_ALIGN", check=lengths.segment_align, held_against=TRANSFORMER_ENGINE + BRIDGE),
    Rule(id="PACK_ALIGN", check=lengths.pack_align, held_against=BRIDGE),
    Rule(id="PER_TOKEN_LOSS", check=loss.per_token_loss, applies=conditions.fine_tunes, held_against=BOTH),
    Rule(
        id="NO_AVERAGE_IN_COLLECTIVE",
        check=loss.no_average_in_collective,
        needs=("megatron_ddp", "average_in_collective"),
        applies=conditions.reduces_over_tokens,
        held_against=BOTH,
    ),
    Rule(
        id="ZERO_LOSS",
        check=loss.zero_loss,
        needs=("clamps_zero_loss",),
        applies=conditions.averages_fillers,
        held_against=(*MEGATRON, StackVersions.TRANSFORMERS),
    ),
    Rule(id="GBS_DIVIDES", check=lengths.gbs_divides, held_against=BOTH),
    Rule(
        id="CONSTANT_STEP",
        check=lengths.constant_step,
        needs=("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
        held_against=BOTH,
    ),
    Rule(id="WORLD", check=lengths.world, needs=("world_size",), held_against=BOTH),
    Rule(
        id="WEIGHT_SHARDS",
        check=framework.weight_shards,
        needs=("weight_shards",),
        applies=conditions.in_megatron_lm,
        held_against=MEGATRON,
    ),
    Rule(
        id="SEQ_LENGTH_MATCH",
        check=lengths.seq_length_match,
        needs=("model_seq_length", "data_seq_length"),
        held_against=BOTH,
    ),
    Rule(id="MAX_POSITION", check=lengths.max_position, needs=("max_position_embeddings",), held_against=MEGATRON),
    Rule(id="CU_SEQLENS_FIXED", check=shapes.cu_seqlens_fixed, applies=conditions.pads_offsets, held_against=BRIDGE),
    Rule(
        id="GRAPH_WIDTH", check=graphs.graph_width, needs=("cuda_graph",), applies=conditions.varies, held_against=BOTH
    ),
    Rule(
        id="GRAPH_ATTENTION",
        check=graphs.graph_attention,
        needs=("cuda_graph",),
        applies=conditions.packed,
        held_against=BOTH,
    ),
    Rule(
        id="GRAPH_ROUTER",
        check=graphs.graph_router,
        needs=("cuda_graph",),
        applies=conditions.masks_padding_in_bridge,
        held_against=(StackVersions.BRIDGE_MAIN,),
    ),
    Rule(id="MTP", check=loss.mtp, needs=("mtp_num_layers",), applies=conditions.packed, held_against=BOTH),
    Rule(
        id="MODEL_FAMILY",
        check=families.model_family,
        needs=("model_family",),
        applies=conditions.packed,
        held_against=BRIDGE,
    ),
    Rule(
        id="THD_BACKEND",
        check=framework.thd_backend,
        needs=("transformer_impl",),
        applies=conditions.packed,
        held_against=BOTH,
    ),
    Rule(id="STOCK_THD", check=framework.stock_thd, needs=("stack",), applies=conditions.packed, held_against=MEGATRON),
    Rule(
        id="STOCK_DENSE",
        check=framework.stock_dense,
        needs=("inter_document_masking",),
        applies=conditions.dense_in_megatron_lm,
        held_against=MEGATRON,
    ),
    Rule(
        id="MIDDLE_STAGES",
        check=framework.middle_stages,
        needs=("middle_stages_read",),
        applies=conditions.has_middle_stages,
        held_against=BRIDGE,
    ),
    Rule(
        id="EMPTY_SEGMENTS",
        check=shapes.empty_segments,
        needs=("refuses_empty_segments",),
        applies=conditions.may_hold_empty_segments,
        held_against=BRIDGE,
    ),
    Rule(
        id="PP_UNIFORM",
        check=shapes.pp_uniform,
        needs=("variable_seq_lengths",),
        applies=conditions.varies_across_stages,
        held_against=MEGATRON,
    ),
    Rule(
        id="PP_INTERLEAVE",
        check=framework.pp_interleave,
        needs=("virtual_pipeline_chunks",),
        applies=conditions.interleaves_or_may,
        held_against=MEGATRON,
    ),
    Rule(
        id="VARIABLE_DISPATCH",
        check=shapes.variable_dispatch,
        needs=("moe_dispatcher",),
        applies=conditions.varies_or_announces,
        held_against=MEGATRON,
    ),
    Rule(
        id="EP_UNIFORM",
        check=shapes.ep_uniform,
        needs=("expert_parallel",),
        applies=conditions.varies,
        severity=Severity.WARN,
        held_against=BRIDGE,
    ),
    Rule(id="FP8_WIDTH", check=precision.fp8_width, needs=("fp8",), held_against=TRANSFORMER_ENGINE),
    Rule(id="CP_HIERARCHY", check=framework.cp_hierarchy, needs=("cp_comm_type",), held_against=BOTH),
    Rule(id="DYNAMIC_CP", check=framework.dynamic_cp, needs=("dynamic_context_parallel",), held_against=MEGATRON),
    Rule(
        id="PARTITION",
        check=framework.partition,
        needs=("stack",),
        applies=conditions.sliced,
        held_against=(*BOTH, StackVersions.TORCHTITAN),
    ),
    Rule(id="WINDOW", check=framework.window, needs=("window",)),
    Rule(id="DTYPE_RANGE", check=lengths.dtype_range),
    Rule(id="SETTINGS_READ", check=framework.settings_read, severity=Severity.WARN),
)


def check(given: RuleInput) -> list[Violation]:
    """Return every way in which the input breaks a rule, errors and warnings, in the order of ``RULES``."""
    return [violation for rule in RULES for violation in rule.violations(given)]


def unchecked(given: RuleInput) -> list[Unchecked]:
    """Return the rules that concern the input and lack facts that nobody declared: nothing is guessed."""
    return [Unchecked(rule.id, missing) for rule in RULES if (missing := rule.missing(given))]


def errors(violations: list[Violation]) -> list[Violation]:
    """Return those for which a reader is rejected."""
    return [violation for violation in violations if violation.severity is Severity.ERROR]


def warnings(violations: list[Violation]) -> list[Violation]:
    """Return those that are only reported."""
    return [violation for violation in violations if violation.severity is Severity.WARN]
