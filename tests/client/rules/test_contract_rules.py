"""The rules of the contract: each broken alone, by name, and repaired by what its remedy says."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.batch_contract import BatchContract, LossReduction, Objective, Packing, Remainder, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, Stack, TrainerFacts
from packhorse.rules import (
    MINIMUM_WINDOW,
    RULES,
    RuleInput,
    Severity,
    Violation,
    check,
    compare,
    errors,
    unchecked,
    warnings,
)

IDS = [
    "MBS_ONLINE",
    "MBS_IN_BATCH",
    "MODES_EXCLUSIVE",
    "PACKED_STEP",
    "CP_LENGTH",
    "SEGMENT_ALIGN",
    "PACK_ALIGN",
    "PER_TOKEN_LOSS",
    "NO_AVERAGE_IN_COLLECTIVE",
    "ZERO_LOSS",
    "GBS_DIVIDES",
    "CONSTANT_STEP",
    "WORLD",
    "WEIGHT_SHARDS",
    "SEQ_LENGTH_MATCH",
    "MAX_POSITION",
    "CU_SEQLENS_FIXED",
    "GRAPH_WIDTH",
    "GRAPH_ATTENTION",
    "GRAPH_ROUTER",
    "MTP",
    "MODEL_FAMILY",
    "THD_BACKEND",
    "STOCK_THD",
    "STOCK_DENSE",
    "MIDDLE_STAGES",
    "EMPTY_SEGMENTS",
    "PP_UNIFORM",
    "PP_INTERLEAVE",
    "VARIABLE_DISPATCH",
    "EP_UNIFORM",
    "FP8_WIDTH",
    "CP_HIERARCHY",
    "DYNAMIC_CP",
    "PARTITION",
    "WINDOW",
    "DTYPE_RANGE",
    "SETTINGS_READ",
]

Change = dict[str, Any]


def case_of(layout: Change | None = None, window: int | None = None, /, **given: Any) -> RuleInput:
    """A case that holds, apart from what is given: fields of the contract or of the trainer's facts."""
    facts = {name: given.pop(name) for name in FACTS & given.keys()}
    declared = {"loss_reduction": LossReduction.PER_TOKEN, **given}
    lengths = {"seq_length": 4096, "global_batch_size": 64, "vocab_size": 32_000}
    lengths = {name: declared.pop(name, value) for name, value in lengths.items()}
    on = ParallelLayout(**(layout or {}))
    return RuleInput(on, resolve(BatchContract(**declared), on, **lengths), TrainerFacts(**facts), window)


FACTS = {f.name for f in fields(TrainerFacts)}


@dataclass(frozen=True)
class Broken:
    """One way to break a rule, and a repair that the remedy names. ``says``: a value the remedy must contain."""

    rule: str
    given: Change
    repair: Change
    says: str
    layout: Change = field(default_factory=dict)
    window: int | None = None
    repaired_window: int | None = None
    severity: Severity = Severity.ERROR
    fact: str | None = None  # without it the rule must be silent
    also: tuple[str, ...] = ()  # rules that cannot hold where this one is broken


CP2: Change = {"context": 2}
PP2: Change = {"pipeline": 2}
VARIES: Change = {"pad_to_max_length": False}
FIXED: Change = {"pad_to_max_length": True}
STATIC: Change = {"pad_cu_seqlens": True, "max_segments": 64}

BREAKS = (
    Broken(
        "MBS_ONLINE",
        {"micro_batch_size": 4},
        {"micro_batch_size": 1, "global_batch_size": 16, "seq_length": 16384},
        "micro_batch_size 1, global_batch_size 16, seq_length 16384",
    ),
    Broken("MBS_ONLINE", {"packing": "concat", "micro_batch_size": 2}, {"micro_batch_size": 1}, "micro_batch_size 1"),
    Broken("MBS_IN_BATCH", {"packing": "in_batch"}, {"micro_batch_size": 2}, "micro_batch_size 2"),
    Broken("MODES_EXCLUSIVE", {"packs_offline": True}, {"packs_offline": False}, "off", fact="packs_offline"),
    Broken("MODES_EXCLUSIVE", {"packs_in_batch": True}, {"packs_in_batch": False}, "off", fact="packs_in_batch"),
    Broken("MODES_EXCLUSIVE", {"defers_packing": True}, {"defers_packing": False}, "off", fact="defers_packing"),
    Broken(
        "CP_LENGTH",
        {"seq_length": 510, "segment_multiple": 2, "partition": "contiguous"},
        {"seq_length": 512, "segment_multiple": 4},
        "512",
        {"context": 4},
        also=("SEGMENT_ALIGN",),
    ),
    Broken("SEGMENT_ALIGN", {"segment_multiple": 6, "seq_length": 4104}, {"segment_multiple": 12}, "12", CP2),
    Broken("SEGMENT_ALIGN", {"segment_multiple": 4, "evaluation_context": 4}, {"segment_multiple": 8}, "8", CP2),
    Broken("PACK_ALIGN", {"pack_multiple": 96}, {"seq_length": 4032}, "4032"),
    Broken("PER_TOKEN_LOSS", {"loss_reduction": "mean"}, {"loss_reduction": "step_tokens"}, "step_tokens", CP2),
    Broken(
        "PER_TOKEN_LOSS",
        {"loss_reduction": "mean"},
        {"loss_reduction": "per_token"},
        "per_token",
        severity=Severity.WARN,
    ),
    Broken(
        "NO_AVERAGE_IN_COLLECTIVE",
        {"megatron_ddp": True, "average_in_collective": True},
        {"average_in_collective": False},
        "false",
        CP2,
        fact="average_in_collective",
    ),
    Broken(
        "ZERO_LOSS",
        {"loss_reduction": "mean", "objective": "pretrain", "clamps_zero_loss": False},
        {"remainder": "drop"},
        "drop",
        fact="clamps_zero_loss",
    ),
    Broken("GBS_DIVIDES", {"global_batch_size": 6}, {"global_batch_size": 8}, "8", {"data": 4}),
    Broken("GBS_DIVIDES", {"global_batch_size": 4}, {"global_batch_size": 8}, "8", {"data": 8}),
    Broken(
        "CONSTANT_STEP",
        {"rampup_batch_size": True},
        {"rampup_batch_size": False},
        "rampup_batch_size off",
        fact="rampup_batch_size",
    ),
    Broken("WORLD", {"world_size": 6}, {"world_size": 4}, "start 4 ranks", {"context": 4}, fact="world_size"),
    Broken("SEQ_LENGTH_MATCH", {"model_seq_length": 2048}, {"model_seq_length": 4096}, "4096", fact="model_seq_length"),
    Broken("SEQ_LENGTH_MATCH", {"data_seq_length": 2048}, {"data_seq_length": 4096}, "4096", fact="data_seq_length"),
    Broken(
        "MAX_POSITION",
        {"max_position_embeddings": 2048},
        {"max_position_embeddings": 4096},
        "4096",
        fact="max_position_embeddings",
    ),
    Broken("CU_SEQLENS_FIXED", {"pad_cu_seqlens": True}, {"max_segments": 64}, "max_segments"),
    Broken("CU_SEQLENS_FIXED", {**STATIC, **VARIES}, FIXED, "true"),
    Broken("GRAPH_WIDTH", {"cuda_graph": CudaGraph.TRANSFORMER_ENGINE, "cuda_graph_modules": ("mlp",), **VARIES}, FIXED,
           "true", fact="cuda_graph"),
    Broken("GRAPH_ATTENTION", {"cuda_graph": CudaGraph.FULL_ITERATION}, STATIC, "static_shapes", fact="cuda_graph"),
    Broken("GRAPH_ATTENTION", {"cuda_graph": CudaGraph.TRANSFORMER_ENGINE, "cuda_graph_modules": ("attn", "mlp")},
           {"cuda_graph_modules": ("mlp",)}, "leave attn out", fact="cuda_graph"),
    Broken("GRAPH_ATTENTION", {"cuda_graph": CudaGraph.LOCAL}, STATIC, "static_shapes", fact="cuda_graph"),
    Broken("GRAPH_ATTENTION", {"cuda_graph": CudaGraph.TRANSFORMER_ENGINE, **STATIC}, {"cuda_graph_modules": ("mlp",)},
           "leave attn out", fact="cuda_graph"),
    Broken("GRAPH_ROUTER", {"stack": Stack.MEGATRON_BRIDGE, "padding_mask": True, "expert_parallel": 2,
                            "cuda_graph": CudaGraph.TRANSFORMER_ENGINE, "cuda_graph_modules": ("moe_router",)},
           {"padding_mask": False}, "padding_mask to false", fact="cuda_graph"),
    Broken("PACKED_STEP", {"stack": Stack.MEGATRON_BRIDGE, "forward_step": "qwen3_vl_step"},
           {"forward_step": "vlm_step"}, "vlm_step", fact="forward_step"),
    Broken("PACKED_STEP", {"stack": Stack.MEGATRON_BRIDGE, "forward_step": "megatron_mimo_step"}, {"packing": "none"},
           "none", fact="forward_step"),
    Broken("WEIGHT_SHARDS", {"stack": Stack.MEGATRON_LM, "weight_shards": 2, "world_size": 2}, {"weight_shards": 1,
           "world_size": 1}, "tensor_parallel_num_weight_shards", fact="stack"),
    Broken("STOCK_DENSE", {"stack": Stack.MEGATRON_LM, "inter_document_masking": True, "packing": "none"},
           {"inter_document_masking": False}, "off", fact="inter_document_masking"),
    Broken("CONSTANT_STEP", {"step_batch_size_schedule": True}, {"step_batch_size_schedule": False},
           "step_batch_size_schedule off", fact="step_batch_size_schedule"),
    Broken("GBS_DIVIDES", {"eval_global_batch_size": 6}, {"eval_global_batch_size": 8}, "8", {"data": 4}),
    Broken("NO_AVERAGE_IN_COLLECTIVE", {"megatron_ddp": True, "average_in_collective": True, "objective": "pretrain"},
           {"average_in_collective": False}, "false", fact="megatron_ddp"),
    Broken("PP_INTERLEAVE", {"stack": Stack.MEGATRON_LM, "virtual_pipeline_chunks": 2}, {"virtual_pipeline_chunks": 1},
           "leave virtual stages out", fact="stack"),
    Broken("CP_HIERARCHY", {"cp_comm_type": "a2a+p2p"}, {"cp_comm_type": "p2p"}, "p2p", fact="cp_comm_type"),
    Broken("CP_HIERARCHY", {"cp_comm_type": "p2p", "hierarchical_cp_sizes": (2, 1)}, {"hierarchical_cp_sizes": None},
           "leave"),
    Broken("SETTINGS_READ", {"unread_settings": ("varlen_mock",)}, {"unread_settings": None}, "leave varlen_mock out",
           severity=Severity.WARN, fact="unread_settings"),
    Broken("MTP", {"mtp_num_layers": 1, "attention_offsets": "logical"}, {"mtp_num_layers": 0}, "0",
           fact="mtp_num_layers"),
    Broken("MTP", {"mtp_num_layers": 2, "attention_offsets": "logical", "objective": "pretrain"},
           {"attention_offsets": "physical"}, "physical", fact="mtp_num_layers"),
    Broken("MODEL_FAMILY", {"model_family": "Qwen2.5_Omni"}, {"packing": "none"}, "none", fact="model_family"),
    Broken("THD_BACKEND", {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"},
           "transformer_engine", fact="transformer_impl"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, "sft": False}, {"sft": True}, "--sft", fact="sft"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, "external_dataloader": False}, {"external_dataloader": True},
           "external", fact="stack"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, "makes_attention_mask": True}, {"makes_attention_mask": False},
           "--no-create", fact="makes_attention_mask"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, **VARIES}, FIXED, "true", fact="stack"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, "packing": "in_batch", "micro_batch_size": 2},
           {"packing": "online", "micro_batch_size": 1}, "online", fact="stack"),
    Broken("STOCK_THD", {"stack": Stack.MEGATRON_LM, "attention_offsets": "logical"}, {"attention_offsets": "physical"},
           "physical", fact="stack"),
    Broken("MIDDLE_STAGES", {"middle_stages_read": False}, {"middle_stages_read": True}, "enable_offline_packing",
           {"pipeline": 3}, fact="middle_stages_read"),
    Broken("MIDDLE_STAGES", {"middle_stages_read": False, "virtual_pipeline_chunks": 2}, {"middle_stages_read": True},
           "enable_offline_packing", PP2, fact="middle_stages_read"),
    Broken("EMPTY_SEGMENTS", {"refuses_empty_segments": True, **STATIC}, {"pad_cu_seqlens": False}, "pad_cu_seqlens",
           fact="refuses_empty_segments"),
    Broken("EMPTY_SEGMENTS", {"refuses_empty_segments": True, "attention_offsets": "logical"},
           {"tail_padding": "extend_last"}, "extend_last", fact="refuses_empty_segments"),
    Broken("EMPTY_SEGMENTS", {"refuses_empty_segments": True, "attention_offsets": "logical"},
           {"attention_offsets": "physical"}, "physical", fact="refuses_empty_segments"),
    Broken("PP_UNIFORM", {"variable_seq_lengths": False, **VARIES}, {"variable_seq_lengths": True},
           "variable_seq_lengths", PP2, fact="variable_seq_lengths"),
    Broken("PP_INTERLEAVE", {"virtual_pipeline_chunks": 2, "microbatch_group_size": 1}, {"microbatch_group_size": 2},
           "2", PP2, fact="virtual_pipeline_chunks"),
    Broken("PP_INTERLEAVE", {"virtual_pipeline_chunks": 2, "global_batch_size": 9}, {"global_batch_size": 12}, "12",
           {"pipeline": 4}, fact="virtual_pipeline_chunks"),
    Broken("VARIABLE_DISPATCH", {"moe_dispatcher": Dispatcher.ALLGATHER, **VARIES},
           {"moe_dispatcher": Dispatcher.ALLTOALL}, "alltoall", fact="moe_dispatcher"),
    Broken("EP_UNIFORM", {"expert_parallel": 8, "moe_pads_uneven": False, **VARIES}, FIXED, "true",
           severity=Severity.WARN, fact="expert_parallel"),
    Broken("GRAPH_WIDTH", {"expert_parallel": 8, "moe_dispatcher": Dispatcher.HYBRID_EP, "cuda_graph": CudaGraph.LOCAL,
                           "cuda_graph_modules": ("moe_router",), **VARIES}, FIXED, "true", fact="cuda_graph",
           also=("EP_UNIFORM",)),
    Broken("FP8_WIDTH", {"fp8": True, "seq_length": 1032, "pack_multiple": 4, "segment_multiple": 1},
           {"seq_length": 1024}, "1024", {"tensor": 4, "sequence_parallel": True}, fact="fp8"),
    Broken("FP8_WIDTH", {"fp8": True, "fp8_recipe": "mxfp8", "seq_length": 4112}, {"seq_length": 4096}, "4096",
           fact="fp8"),
    Broken("FP8_WIDTH", {"fp4": True, "seq_length": 4104}, {"seq_length": 4096}, "4096", fact="fp4"),
    Broken("FP8_WIDTH", {"fp8": True, "seq_length": 4100}, {"seq_length": 4096}, "4096", CP2, fact="fp8"),
    Broken("FP8_WIDTH", {"fp8": True, "fp8_width": 32, **VARIES}, {"pack_multiple": 32}, "32", CP2, fact="fp8"),
    Broken("CP_HIERARCHY", {"cp_comm_type": "a2a+p2p"}, {"hierarchical_cp_sizes": (2, 1)}, "[2, 1]", CP2,
           fact="cp_comm_type"),
    Broken("CP_HIERARCHY", {"cp_comm_type": "a2a+p2p", "hierarchical_cp_sizes": (8, 4)},
           {"hierarchical_cp_sizes": (16, 1)}, "[16, 1]", {"context": 16}),
    Broken("DYNAMIC_CP", {"dynamic_context_parallel": True}, {"dynamic_context_parallel": False}, "off",
           fact="dynamic_context_parallel"),
    Broken("DYNAMIC_CP", {"packing_scheduler": "dp_balanced"}, {"packing_scheduler": None}, "out",
           fact="packing_scheduler"),
    Broken("PARTITION", {"stack": Stack.TORCHTITAN, "partition": "zigzag"}, {"partition": "whole"}, "whole", CP2,
           fact="stack"),
    Broken("WINDOW", {}, {}, "2", window=1, repaired_window=2),
    Broken("WINDOW", {"virtual_pipeline_chunks": 2}, {}, "5", {"pipeline": 4}, window=4, repaired_window=5),
    Broken("DTYPE_RANGE", {"vocab_size": (1 << 31) + 1}, {"vocab_size": 32_000}, "below 2147483648"),
    Broken("DTYPE_RANGE", {"pad_id": 32_000}, {"pad_id": 0}, "0"),
)  # fmt: skip


def broken_case(broken: Broken) -> RuleInput:
    return case_of(broken.layout, broken.window, **broken.given)


def repaired_case(broken: Broken) -> RuleInput:
    return case_of(broken.layout, broken.repaired_window, **{**broken.given, **broken.repair})


def test_the_rules_are_those_of_the_design_in_its_order() -> None:
    assert [rule.id for rule in RULES] == IDS


def test_every_rule_that_a_declaration_can_break_is_broken_here() -> None:
    assert {broken.rule for broken in BREAKS} == set(IDS)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: f"{b.rule}-{'-'.join(b.given)}")
def test_a_break_is_found_by_name_and_nothing_else_is(broken: Broken) -> None:
    found = check(broken_case(broken))
    assert [v.rule for v in found] == [broken.rule, *broken.also]
    assert found[0].severity is broken.severity
    assert broken.says in found[0].remedy
    assert found[0].got in str(found[0])


@pytest.mark.parametrize("broken", BREAKS, ids=lambda b: f"{b.rule}-{'-'.join(b.given)}")
def test_what_the_remedy_says_repairs_it(broken: Broken) -> None:
    assert check(repaired_case(broken)) == []


@pytest.mark.parametrize("broken", [b for b in BREAKS if b.fact], ids=lambda b: f"{b.rule}-{b.fact}")
def test_a_rule_is_silent_without_the_fact_it_needs(broken: Broken) -> None:
    case = broken_case(broken)
    silent = replace(case, trainer=replace(case.trainer, **{str(broken.fact): None}))
    assert broken.rule not in {v.rule for v in check(silent)}


def test_a_rule_without_its_facts_is_listed_as_not_checked() -> None:
    missing = dict(unchecked(case_of()))
    assert missing["MTP"] == ("mtp_num_layers",)
    assert missing["WINDOW"] == ("window",)
    assert "MBS_ONLINE" not in missing, "it needs no fact"
    assert "PP_INTERLEAVE" not in missing, "one stage does not interleave"
    assert "MTP" not in dict(unchecked(case_of(mtp_num_layers=0)))


def test_nothing_is_refused_where_no_stage_is_in_the_middle_and_no_segment_is_empty() -> None:
    both: Change = {"middle_stages_read": False, "refuses_empty_segments": True}
    assert check(case_of(PP2, **both)) == [], "two stages: the first and the last"
    assert check(case_of({"pipeline": 4}, packing="none", **both)) == [], "dense rows have no offsets"
    trimmed = case_of(attention_offsets="logical", refuses_empty_segments=True, pad_to_max_length=False)
    assert check(trimmed) == [], "rows end where their last segment does"


def test_all_violations_are_listed_at_once_in_the_order_of_the_rules() -> None:
    case = case_of(CP2, 1, loss_reduction="mean", megatron_ddp=True, average_in_collective=True, seq_length=510)
    assert [v.rule for v in check(case)] == [
        "CP_LENGTH",
        "PACK_ALIGN",
        "PER_TOKEN_LOSS",
        "NO_AVERAGE_IN_COLLECTIVE",
        "WINDOW",
    ]


def test_a_mean_over_packs_is_an_error_across_context_parallel_ranks_and_a_warning_else() -> None:
    assert errors(check(case_of(CP2, loss_reduction="mean")))
    assert [v.rule for v in warnings(check(case_of(loss_reduction="mean")))] == ["PER_TOKEN_LOSS"]
    assert not check(case_of(CP2, loss_reduction="mean", objective=Objective.PRETRAIN))


def test_dense_rows_need_nothing_of_packed_ones() -> None:
    facts = {"transformer_impl": "local", "cuda_graph": CudaGraph.FULL_ITERATION, "mtp_num_layers": 2}
    assert not check(case_of(packing=Packing.NONE, micro_batch_size=4, **facts))
    assert not check(case_of(packing=Packing.CONCAT, isolate_documents=False, micro_batch_size=4, **facts))


def test_segments_may_be_aligned_more_tightly_than_sequence_parallelism_asks() -> None:
    layout = {"context": 2, "tensor": 8, "sequence_parallel": True}
    case = case_of(layout, segment_multiple=4)
    assert case.contract.segment_multiple == 4
    assert case.contract.row_multiple == 16
    assert not check(case)
    assert case_of(layout).contract.segment_multiple == 16


def test_a_wider_multiple_is_kept() -> None:
    case = case_of(CP2, segment_multiple=64, pack_multiple=128)
    assert (case.contract.segment_multiple, case.contract.pack_multiple) == (64, 128)
    assert not check(case)


LAYOUTS = st.builds(
    ParallelLayout,
    data=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2, 3, 4, 8]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
)


@st.composite
def valid_cases(draw: st.DrawFn) -> RuleInput:
    """Right by construction: lengths are multiples of what the layout asks."""
    layout = draw(LAYOUTS)
    packing = draw(st.sampled_from(list(Packing)))
    mbs = {Packing.ONLINE: 1, Packing.CONCAT: 1, Packing.IN_BATCH: 2}.get(packing) or draw(st.integers(1, 4))
    unit = layout.context * layout.tensor * 2
    length = unit * 8 * draw(st.integers(1, 64))
    facts = TrainerFacts(
        world_size=draw(st.sampled_from([None, layout.world_size])),
        model_seq_length=draw(st.sampled_from([None, length])),
        max_position_embeddings=draw(st.sampled_from([None, length, 2 * length])),
        mtp_num_layers=0,
        rampup_batch_size=draw(st.sampled_from([None, False])),
        fp8=draw(st.sampled_from([None, False, packing is not Packing.IN_BATCH])),
        clamps_zero_loss=draw(st.sampled_from([None, True])),
    )
    declared = BatchContract(
        packing=packing,
        micro_batch_size=mbs,
        loss_reduction=draw(st.sampled_from([LossReduction.PER_TOKEN, LossReduction.STEP_TOKENS])),
        remainder=draw(st.sampled_from(list(Remainder))),
        segment_multiple=draw(st.sampled_from([None, 2 * layout.context, unit])),
    )
    gbs = mbs * layout.data * draw(st.integers(1, 8))
    contract = resolve(
        declared, layout, seq_length=length, global_batch_size=gbs, vocab_size=draw(st.integers(1, 1 << 31))
    )
    return RuleInput(layout, contract, facts, draw(st.sampled_from([None, MINIMUM_WINDOW, 8])))


FAULTS: dict[str, Any] = {
    "WORLD": lambda c: replace(c, trainer=replace(c.trainer, world_size=c.layout.world_size + 1)),
    "WINDOW": lambda c: replace(c, window=1),
    "SEQ_LENGTH_MATCH": lambda c: replace(c, trainer=replace(c.trainer, data_seq_length=c.contract.seq_length + 1)),
    "MAX_POSITION": lambda c: replace(c, trainer=replace(c.trainer, max_position_embeddings=c.contract.seq_length - 1)),
    "CONSTANT_STEP": lambda c: replace(c, trainer=replace(c.trainer, step_batch_size_schedule=True)),
    "DYNAMIC_CP": lambda c: replace(c, trainer=replace(c.trainer, dynamic_context_parallel=True)),
    "MODES_EXCLUSIVE": lambda c: replace(c, trainer=replace(c.trainer, packs_offline=True)),
    "DTYPE_RANGE": lambda c: replace(c, contract=replace(c.contract, pad_id=c.contract.vocab_size)),
}


@given(valid_cases())
def test_a_valid_case_is_never_refused(case: RuleInput) -> None:
    assert errors(check(case)) == []


@given(valid_cases(), st.sampled_from(sorted(FAULTS)))
def test_a_single_fault_is_caught_by_name(case: RuleInput, fault: str) -> None:
    assert {v.rule for v in check(FAULTS[fault](case))} == {fault}


SERVED_ON = ParallelLayout(data=2)
SERVED = resolve(BatchContract(), SERVED_ON, seq_length=4096, global_batch_size=8, vocab_size=50_257)


def differences(declared: BatchContract, on: ParallelLayout = SERVED_ON) -> list[Violation]:
    return compare(declared, on, MINIMUM_WINDOW, SERVED, SERVED_ON)


def test_what_a_reader_leaves_out_is_not_compared() -> None:
    assert differences(BatchContract()) == []


@pytest.mark.parametrize(
    ("declared", "rule"),
    [
        ({"seq_length": 2048}, "SEQ_LENGTH_MATCH"),
        ({"partition": "zigzag"}, "PARTITION"),
        ({"segment_multiple": 8}, "SEGMENT_ALIGN"),
        ({"vocab_size": 50_000}, "DTYPE_RANGE"),
        ({"global_batch_size": 16}, "RANKS_AGREE"),
    ],
)
def test_a_difference_names_its_rule_and_field(declared: Change, rule: str) -> None:
    (found,) = differences(BatchContract(**declared))
    assert (found.rule, found.field) == (rule, next(iter(declared)))
    assert "(the server's)" in found.want


@pytest.mark.parametrize("name", ["segment_multiple", "pack_multiple"])
@pytest.mark.parametrize(("declared", "served", "agrees"), [(1, 8, True), (4, 8, True), (8, 8, True), (16, 8, False),
                                                            (3, 8, False)])  # fmt: skip
def test_a_finer_alignment_than_the_servers_agrees_and_a_coarser_is_refused(
    name: str, declared: int, served: int, agrees: bool
) -> None:
    asked: Change = {name: declared}
    change: Change = {name: served}
    found = compare(BatchContract(**asked), SERVED_ON, None, replace(SERVED, **change), SERVED_ON)
    assert [v.field for v in found] == ([] if agrees else [name])


def test_multi_token_prediction_over_physical_offsets_is_served() -> None:
    assert not check(case_of({"context": 2}, mtp_num_layers=2))
    assert not check(case_of(mtp_num_layers=1, packing="none", attention_offsets="logical"))


def test_decreasing_the_batch_is_refused_only_where_it_does_something() -> None:
    assert not check(case_of({"data": 4}, decrease_batch_size_if_needed=True))
    found = {v.rule for v in check(case_of({"data": 4}, decrease_batch_size_if_needed=True, global_batch_size=6))}
    assert found == {"GBS_DIVIDES", "CONSTANT_STEP"}


def test_a_schedule_that_bridge_hands_to_nobody_is_a_warning() -> None:
    (found,) = check(case_of(stack=Stack.MEGATRON_BRIDGE, step_batch_size_schedule=True))
    assert (found.rule, found.severity) == ("CONSTANT_STEP", Severity.WARN)


def test_a_packing_that_is_put_off_to_the_step_may_get_dense_rows_and_no_packed_ones() -> None:
    assert not check(case_of(packing="none", defers_packing=True))
    (found,) = check(case_of(defers_packing=True))
    assert "vlm_step" in found.remedy
    assert "none" in found.remedy


@pytest.mark.parametrize(
    ("recipe", "rank_unit"), [("delayed", 8), ("tensorwise", 8), ("blockwise", 8), ("mxfp8", 32), ("MXFP8", 32)]
)
@pytest.mark.parametrize(("context", "tensor", "sequence"), [(1, 1, False), (2, 1, False), (1, 4, True), (2, 4, True),
                                                             (1, 4, False)])  # fmt: skip
def test_a_rank_of_fp8_gets_whole_units(recipe: str, rank_unit: int, context: int, tensor: int, sequence: bool) -> None:
    layout = {"context": context, "tensor": tensor, "sequence_parallel": sequence}
    unit = rank_unit * context * (tensor if sequence else 1)
    for length, holds in ((unit * 3, True), (unit * 3 + unit // 2, False)):
        found = check(case_of(layout, fp8=True, fp8_recipe=recipe, seq_length=length, segment_multiple=2 * context))
        assert ("FP8_WIDTH" in {v.rule for v in found}) != holds


def test_the_rows_of_a_dense_micro_batch_count_together_in_fp8() -> None:
    dense = {"packing": "none", "fp8": True, "seq_length": 1028}
    assert not check(case_of(micro_batch_size=2, **dense))
    assert [v.rule for v in check(case_of(micro_batch_size=1, **dense))] == ["FP8_WIDTH"]


def test_all_gather_of_one_rows_ranks_takes_any_width() -> None:
    experts = {"moe_dispatcher": Dispatcher.ALLGATHER, **VARIES}
    assert not check(case_of(expert_parallel=1, **experts))
    assert "VARIABLE_DISPATCH" in {v.rule for v in check(case_of(expert_parallel=2, **experts))}


def test_a_rule_about_a_stack_says_which_versions_it_was_held_against() -> None:
    ours = {rule.id for rule in RULES if not rule.held_against}
    assert ours == {"WINDOW", "DTYPE_RANGE", "SETTINGS_READ"}


def test_a_model_may_pad_its_vocabulary() -> None:
    assert differences(BatchContract(vocab_size=50_304)) == []


def test_a_difference_of_layout_and_a_broken_rule_are_listed_together() -> None:
    found = differences(BatchContract(trainer=TrainerFacts(transformer_impl="local")), ParallelLayout(data=4))
    assert [v.rule for v in found] == ["WORLD", "THD_BACKEND"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_says_when_it_holds_why_and_where_that_comes_from(rule: Any) -> None:
    summary, reason, source = rule.documentation
    assert summary.endswith(".")
    assert "\n" not in summary
    assert reason
    assert source
    assert set(rule.needs) <= FACTS | {"window"}
