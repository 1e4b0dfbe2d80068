"""Operations on a Megatron-Bridge configuration: a namespace with its attributes, checked before launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from packhorse import BatchContract, ParallelLayout
from packhorse.contract.batch_contract import resolve
from packhorse.declare import bridge_rule_input, check_bridge
from packhorse.rules import Severity, Violation
from tests.conformance.rows import contract_of
from tests.conformance.vectors import Case

# Upstream's rule in ours. Those of settings that make no declaration are BRIDGE_… rules.
OUR_RULES: Mapping[str, tuple[str, ...]] = {
    "R1": ("MBS_ONLINE",),
    "R2": ("MBS_IN_BATCH",),
    "R3": ("CP_LENGTH",),
    "R4": ("PER_TOKEN_LOSS",),
    "R5": ("NO_AVERAGE_IN_COLLECTIVE",),
    "R6": ("MODES_EXCLUSIVE",),
    "R7": ("BRIDGE_SPECS",),
    "R8": ("BRIDGE_SPECS",),
    "R9": ("CU_SEQLENS_FIXED",),
    "R10": ("GRAPH_WIDTH",),
    "R11": ("GRAPH_ATTENTION",),
    "R12": ("BRIDGE_ENERGON_PACKING", "BRIDGE_SIZES"),
    "R13": ("BRIDGE_ENERGON_PACKING",),
    "R14": ("BRIDGE_ENERGON_SIZES",),
    "R15": ("BRIDGE_SPEC_VALUES",),
    "R16": ("SEQ_LENGTH_MATCH",),
    "R17": ("WORLD",),
    "R18": ("GBS_DIVIDES",),
    "R20": ("CP_HIERARCHY",),
}
# What upstream documents as unsupported and does not check; ours refuse it.
GAPS = ("SEGMENT_ALIGN",)
# Cases that record what upstream has dropped since as stale: Megatron-Core rolls the targets of MTP within segments.
SINCE_ACCEPTED = ("mtp_offline", "energon_mtp")

DATASETS = {
    "gpt_sft": "GPTSFTDatasetConfig",
    "gpt_pretrain": "GPTDatasetConfig",
    "direct_hf": "DirectHFSFTDatasetConfig",
    "energon": "EnergonDatasetConfig",
    "mock_vlm": "MockVLMSFTDatasetConfig",
    "custom_provider": "OwnDatasetProvider",
}
# What a dataset of this kind does where its settings say nothing.
UNSAID: Mapping[str, Mapping[str, Any]] = {"gpt_sft": {"pad_to_max_length": False}}
ENCODERS = {"qwen_vl": "QwenVLEnergonTaskEncoderConfig"}
MODEL_NAMES = {
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "sp": "sequence_parallel",
    "vpp": "virtual_pipeline_model_parallel_size",
}
TRAIN_NAMES = {
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "eval_mbs": "eval_micro_batch_size",
    "eval_gbs": "eval_global_batch_size",
}
DIST_NAMES = {"eval_cp": "eval_context_parallel_size"}
IN_SPECS = ("packed_sequence_size", "pad_cu_seqlens", "pad_seq_to_mult", "max_single_sequence_length")
OLDER = {
    "GPTSFTDatasetConfig": "FinetuningDatasetConfig",
    "offline_packing_specs": "packed_sequence_specs",
    "enable_in_batch_packing": "pack_sequences_in_batch",
}


def _of_class(name: str, values: Mapping[str, Any]) -> Any:
    """An object that only its class name and its attributes tell."""
    return type(name, (SimpleNamespace,), {})(**values)


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _model(values: Mapping[str, Any]) -> SimpleNamespace:
    model = _renamed(values, MODEL_NAMES)
    if "dist_train" in model:
        model["dist_train"] = SimpleNamespace(use_dist_train=model["dist_train"])
    return SimpleNamespace(**model)


def _packing(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Attributes of a dataset that say how it packs."""
    packing = values or {"mode": "none"}
    modes = [packing["mode"]] if isinstance(packing["mode"], str) else packing["mode"]
    specs = {name: packing[name] for name in IN_SPECS if name in packing}
    return {
        "enable_offline_packing": "offline" in modes,
        "offline_packing_specs": SimpleNamespace(**specs) if specs else None,
        "enable_in_batch_packing": "in_batch" in modes,
        "packing_buffer_size": packing.get("packing_buffer_size"),
    }


def _dataset(values: Mapping[str, Any], kind: str, *, older: bool) -> Any:
    given = {name: value for name, value in values.items() if name not in ("kind", "packing", "encoder")}
    attributes = {**UNSAID.get(kind, {}), **given, **_packing(values.get("packing"))}
    if "encoder" in values:
        attributes["task_encoder"] = _of_class(ENCODERS.get(values["encoder"], "OtherTaskEncoderConfig"), {})
    name = DATASETS[kind]
    if older:
        del attributes["enable_offline_packing"], attributes["packing_buffer_size"]
        name, attributes = OLDER.get(name, name), _renamed(attributes, OLDER)
    return _of_class(name, attributes)


def configuration(given: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> SimpleNamespace:
    """A ConfigContainer's attributes, from a case's short names."""
    section = {name: {**defaults.get(name, {}), **given.get(name, {})} for name in ("model", "train", "dataset", "ddp")}
    rest = {
        name: SimpleNamespace(**_renamed(given[name], names))
        for name, names in (("dist", DIST_NAMES), ("validation", TRAIN_NAMES))
        if name in given
    }
    return SimpleNamespace(
        model=_model(section["model"]),
        train=SimpleNamespace(**_renamed(section["train"], TRAIN_NAMES)),
        ddp=SimpleNamespace(**section["ddp"]),
        dataset=_dataset(section["dataset"], kind, older=given.get("api") == "old"),
        **rest,
    )


def _world_size(given: Mapping[str, Any]) -> int:
    model = given.get("model", {})
    default = math.prod(model.get(axis, 1) for axis in ("cp", "tp", "pp"))
    return int(given.get("world_size", default))


def _errors(violations: list[Violation]) -> set[str]:
    return {violation.rule for violation in violations if violation.severity is Severity.ERROR}


def validate_config(case: Case) -> None:
    """A kind such as "a|b" is checked as either. What upstream derives is compared where it is a contract field."""
    for kind in case.input.get("dataset", {}).get("kind", "gpt_sft").split("|"):
        cfg, world = configuration(case.input, case.group["defaults"], kind), _world_size(case.input)
        broken = _errors(check_bridge(cfg, world))
        if case.id.rsplit("/", 1)[-1] in SINCE_ACCEPTED:
            assert not broken, broken
        elif case.rejects:
            assert broken.intersection(OUR_RULES[case.expect["rule_id"]]), broken
        elif str(case.expect.get("note", "")).startswith("GAP"):
            assert broken, "a gap of upstream's checks that ours close"
            assert broken <= set(GAPS)
        else:
            assert not broken, broken
            contract = bridge_rule_input(cfg, world).contract
            for name, value in case.expect.get("derived", {}).items():
                assert getattr(contract, name, value) == value


def _plain(*, dataset: Mapping[str, Any] | None = None, **given: Any) -> set[str]:
    """The errors of a configuration that is right in all that is not given."""
    whole = {"dataset": {"seq_length": 512, "packing": None, **(dataset or {})}, **given}
    whole["model"] = {"seq_length": whole["dataset"]["seq_length"], "calculate_per_token_loss": True, **given["model"]}
    return _errors(check_bridge(configuration(whole, {}, "direct_hf"), given["world_size"]))


def derive_alignment(case: Case) -> None:
    """The multiple of a whole row; a user's own widens it, as our ``pack_multiple`` does."""
    given = case.input
    user, evaluation = given.get("user_multiple"), given.get("eval_cp") or given["cp"]
    world = given["tp"] * math.lcm(given["cp"], evaluation)
    dataset = {"seq_length": given["seq_length"], "pad_to_multiple_of": user}
    model = {"cp": given["cp"], "tp": given["tp"], "sp": given["sp"]}
    broken = _plain(
        dataset=dataset,
        model=model,
        dist={"eval_context_parallel_size": evaluation},
        train={"mbs": 1, "gbs": world},
        world_size=world,
    )
    assert bool(broken) == case.rejects, broken
    if "multiple" in case.expect:
        layout = ParallelLayout(context=given["cp"], tensor=given["tp"], sequence_parallel=given["sp"])
        declared = BatchContract(evaluation_context=evaluation, pack_multiple=user)
        resolved = resolve(declared, layout, seq_length=given["seq_length"], global_batch_size=1, vocab_size=1)
        assert resolved.row_multiple == case.expect["multiple"]


def num_microbatches(case: Case) -> None:
    """Micro-batches of a step, or whether an interleaved pipeline can run that many."""
    given = case.input
    pipeline, data, mbs = given.get("pp", 1), given.get("dp", 1), given.get("mbs", 1)
    gbs = given.get("gbs", given.get("num_microbatches", 1) * mbs * data)
    model = {"pp": pipeline, "vpp": given.get("vpp"), "cp": 1}
    model["microbatch_group_size_per_vp_stage"] = given.get("microbatch_group_size_per_vp_stage")
    broken = _plain(model=model, train={"mbs": mbs, "gbs": gbs}, world_size=pipeline * data)
    assert bool(broken) == case.rejects, broken
    if "num_microbatches" in case.expect:
        contract = contract_of(seq_length=512, micro_batch_size=mbs)
        layout = ParallelLayout(data=data, pipeline=pipeline)
        assert replace(contract, global_batch_size=gbs).num_microbatches(layout) == case.expect["num_microbatches"]
