"""All rules about what is declared, in the order of the documentation, and the questions asked of them."""

from __future__ import annotations

from packhorse.rules import conditions, families, lengths, loss, shapes
from packhorse.rules import training_framework as framework
from packhorse.rules.model import Rule, RuleInput, Severity, Unchecked, Violation

__all__ = ["RULES", "check", "errors", "unchecked", "warnings"]

RULES: tuple[Rule, ...] = (
    Rule(id="MBS_ONLINE", check=lengths.mbs_online, applies=conditions.one_row_a_pack),
    Rule(id="MBS_IN_BATCH", check=lengths.mbs_in_batch, applies=conditions.in_batch),
    Rule(id="MODES_EXCLUSIVE", check=framework.modes_exclusive, needs=tuple(framework.PACKERS)),
    Rule(id="CP_LENGTH", check=lengths.cp_length, applies=conditions.context_parallel),
    Rule(id="SEGMENT_ALIGN", check=lengths.segment_align),
    Rule(id="PACK_ALIGN", check=lengths.pack_align),
    Rule(id="PER_TOKEN_LOSS", check=loss.per_token_loss, applies=conditions.fine_tunes),
    Rule(
        id="NO_AVERAGE_IN_COLLECTIVE",
        check=loss.no_average_in_collective,
        needs=("megatron_ddp", "average_in_collective"),
        applies=conditions.fine_tunes_across_context,
    ),
    Rule(id="ZERO_LOSS", check=loss.zero_loss, needs=("clamps_zero_loss",), applies=conditions.averages_fillers),
    Rule(id="GBS_DIVIDES", check=lengths.gbs_divides),
    Rule(
        id="CONSTANT_STEP",
        check=lengths.constant_step,
        needs=("rampup_batch_size", "decrease_batch_size_if_needed"),
    ),
    Rule(id="WORLD", check=lengths.world, needs=("world_size",)),
    Rule(id="SEQ_LENGTH_MATCH", check=lengths.seq_length_match, needs=("model_seq_length", "data_seq_length")),
    Rule(id="MAX_POSITION", check=lengths.max_position, needs=("max_position_embeddings",)),
    Rule(id="CU_SEQLENS_FIXED", check=shapes.cu_seqlens_fixed, applies=conditions.pads_offsets),
    Rule(id="GRAPH_WIDTH", check=shapes.graph_width, needs=("cuda_graph",), applies=conditions.varies),
    Rule(id="GRAPH_ATTENTION", check=shapes.graph_attention, needs=("cuda_graph",), applies=conditions.packed),
    Rule(id="MTP", check=loss.mtp, needs=("mtp_num_layers",), applies=conditions.fine_tunes_packed),
    Rule(id="MODEL_FAMILY", check=families.model_family, needs=("model_family",), applies=conditions.packed),
    Rule(id="THD_BACKEND", check=framework.thd_backend, needs=("transformer_impl",), applies=conditions.packed),
    Rule(id="STOCK_THD", check=framework.stock_thd, needs=("stack",), applies=conditions.packed),
    Rule(
        id="PP_UNIFORM",
        check=shapes.pp_uniform,
        needs=("variable_seq_lengths",),
        applies=conditions.varies_across_stages,
    ),
    Rule(
        id="PP_INTERLEAVE",
        check=framework.pp_interleave,
        needs=("virtual_pipeline_chunks",),
        applies=conditions.pipelined,
    ),
    Rule(id="VARIABLE_DISPATCH", check=shapes.variable_dispatch, needs=("moe_dispatcher",), applies=conditions.varies),
    Rule(
        id="EP_UNIFORM",
        check=shapes.ep_uniform,
        needs=("expert_parallel",),
        applies=conditions.varies,
        severity=Severity.WARN,
    ),
    Rule(id="FP8_WIDTH", check=shapes.fp8_width, needs=("fp8",)),
    Rule(id="CP_HIERARCHY", check=framework.cp_hierarchy, needs=("cp_comm_type",), applies=conditions.context_parallel),
    Rule(id="DYNAMIC_CP", check=framework.dynamic_cp, needs=("dynamic_context_parallel",)),
    Rule(id="PARTITION", check=framework.partition, needs=("stack",), applies=conditions.sliced),
    Rule(id="WINDOW", check=framework.window, needs=("window",)),
    Rule(id="DTYPE_RANGE", check=lengths.dtype_range),
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
