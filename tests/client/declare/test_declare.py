"""Declaring from a stack's own settings: recorded namespaces of both generations, nothing imported.

The namespaces hold the attributes that Megatron-LM (d98e8a64) and Megatron-Bridge (89a790a6 and 067f987d) have;
not run on a GPU, and without either package.
"""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packhorse.contract.batch_contract import BatchContract, LossReduction, Objective, Packing, ReaderPolicy, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, Stack, TrainerFacts
from packhorse.declare import BRIDGE_RULES, bridge_rule_input, check_bridge
from packhorse.errors import ConfigError
from packhorse.rules import RuleInput, Severity, check, errors, unchecked
from tests.harness import DEADLINE_S

# After validate_args: what a Megatron-LM job of 16 ranks holds, of what is read.
MEGATRON: dict[str, Any] = {
    "world_size": 16,
    "data_parallel_size": 2,
    "context_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_tp_pp_dp_mapping": False,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "padded_vocab_size": 128_256,
    "calculate_per_token_loss": True,
    "ddp_average_in_collective": False,
    "use_torch_fsdp2": False,
    "max_position_embeddings": 8192,
    "rampup_batch_size": None,
    "step_batch_size_schedule": None,
    "tensor_parallel_num_weight_shards": None,
    "decrease_batch_size_if_needed": False,
    "transformer_impl": "transformer_engine",
    "mtp_num_layers": None,
    "virtual_pipeline_model_parallel_size": 2,
    "microbatch_group_size_per_vp_stage": 2,
    "variable_seq_lengths": False,
    "num_experts": None,
    "expert_model_parallel_size": 1,
    "moe_token_dispatcher_type": "allgather",
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "fp8": None,
    "cp_comm_type": ["p2p"],
    "hierarchical_context_parallel_sizes": None,
    "hybrid_context_parallel": False,
    "dataloader_type": "external",
    "sft": True,
    "create_attention_mask_in_dataloader": False,
}


def megatron(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**MEGATRON, **changed})


class GraphModule(Enum):
    attn = 1
    mlp = 2


def facts_of(contract: BatchContract) -> TrainerFacts:
    assert contract.trainer is not None
    return contract.trainer


class TestMegatron:
    def test_a_fine_tuning_job_declares_packed_rows_read_by_tensor_rank_zero(self) -> None:
        contract = BatchContract.from_megatron(megatron())
        assert contract == BatchContract(
            seq_length=8192,
            micro_batch_size=1,
            global_batch_size=64,
            vocab_size=128_256,
            loss_reduction=LossReduction.PER_TOKEN,
            packing=Packing.ONLINE,
            partition=Partition.WHOLE,
            readers=ReaderPolicy.TENSOR_ZERO,
            objective=Objective.SFT,
            trainer=TrainerFacts(
                stack=Stack.MEGATRON_LM,
                world_size=16,
                model_seq_length=8192,
                max_position_embeddings=8192,
                transformer_impl="transformer_engine",
                megatron_ddp=True,
                average_in_collective=False,
                clamps_zero_loss=True,
                rampup_batch_size=False,
                step_batch_size_schedule=False,
                weight_shards=1,
                decrease_batch_size_if_needed=False,
                mtp_num_layers=0,
                fp8=False,
                virtual_pipeline_chunks=2,
                microbatch_group_size=2,
                variable_seq_lengths=False,
                expert_parallel=1,
                cuda_graph=CudaGraph.NONE,
                cuda_graph_modules=(),
                cp_comm_type="p2p",
                dynamic_context_parallel=False,
                external_dataloader=True,
                sft=True,
                makes_attention_mask=False,
                middle_stages_read=True,
                refuses_empty_segments=False,
                tokens_on_every_stage=False,
            ),
        )

    def test_its_layout(self) -> None:
        layout = ParallelLayout.from_megatron(megatron())
        assert layout == ParallelLayout(data=2, context=2, tensor=2, pipeline=2, sequence_parallel=True)
        assert ParallelLayout.from_megatron(megatron(use_tp_pp_dp_mapping=True)).order == "tp-cp-pp-dp"
        assert ParallelLayout.from_megatron(megatron(data_parallel_size=None, world_size=32)).data == 4

    def test_a_pretraining_job_declares_dense_rows_read_at_the_edges(self) -> None:
        contract = BatchContract.from_megatron(megatron(sft=False))
        assert (contract.packing, contract.isolate_documents) == (Packing.CONCAT, False)
        assert (contract.readers, contract.objective) == (ReaderPolicy.TENSOR_ZERO_EDGES, Objective.PRETRAIN)

    def test_packing_can_be_said_where_the_arguments_do_not(self) -> None:
        assert BatchContract.from_megatron(megatron(), Packing.NONE).readers is ReaderPolicy.TENSOR_ZERO_EDGES
        assert BatchContract.from_megatron(megatron(sft=False), Packing.CONCAT).isolate_documents is None

    def test_what_is_missing_is_not_declared(self) -> None:
        contract = BatchContract.from_megatron(SimpleNamespace())
        assert (contract.seq_length, contract.loss_reduction, contract.vocab_size) == (None, None, None)
        assert facts_of(contract) == TrainerFacts(
            stack=Stack.MEGATRON_LM,
            megatron_ddp=True,
            clamps_zero_loss=True,
            refuses_empty_segments=False,
            tokens_on_every_stage=False,
        )

    def test_a_whole_namespace_leaves_unchecked_only_what_arguments_cannot_tell(self) -> None:
        declared, layout = BatchContract.from_megatron(megatron()), ParallelLayout.from_megatron(megatron())
        contract = resolve(declared, layout, seq_length=8192, global_batch_size=64, vocab_size=128_256)
        case = RuleInput(layout, contract, facts_of(declared), window=4)
        assert check(case) == []
        left = {fact for _, missing in unchecked(case) for fact in missing}
        assert left == {"packs_offline", "packs_in_batch", "defers_packing", "data_seq_length", "model_family"}

    @pytest.mark.parametrize(
        ("given", "fact", "value"),
        [
            ({"fp8": "hybrid"}, "fp8", True),
            ({"dataloader_type": "cyclic"}, "external_dataloader", False),
            ({"num_experts": 8}, "moe_dispatcher", Dispatcher.ALLGATHER),
            ({"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "flex"}, "moe_dispatcher", Dispatcher.FLEX),
            ({"dynamic_context_parallel": True}, "dynamic_context_parallel", True),
            ({"sequence_packing_scheduler": "dp_balanced"}, "packing_scheduler", "dp_balanced"),
            ({"cp_comm_type": ["a2a+p2p", "p2p"]}, "cp_comm_type", "a2a+p2p,p2p"),
            ({"hierarchical_context_parallel_sizes": [8, 2]}, "hierarchical_cp_sizes", (8, 2)),
            ({"use_torch_fsdp2": True}, "megatron_ddp", False),
            ({"step_batch_size_schedule": "0:8 1000:32"}, "step_batch_size_schedule", True),
            ({"step_batch_size_schedule": None, "rampup_batch_size": [8, 8, 1000]}, "rampup_batch_size", False),
            ({"rl_use_sequence_packing": True}, "packs_in_batch", False),
            ({"rl_use_sequence_packing": True, "perform_rl_step": True}, "packs_in_batch", True),
            ({"dataloader_inter_document_masking": True}, "inter_document_masking", True),
            ({"tensor_parallel_num_weight_shards": 8, "tensor_model_parallel_size": 4}, "weight_shards", 2),
            ({"tensor_parallel_num_weight_shards": None, "gtp_weight_remat_size": 1}, "weight_shards", 1),
            ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "fp8_recipe", "mxfp8"),
            ({"fp4": "e2m1"}, "fp4", True),
            ({"eval_global_batch_size": 12}, "eval_global_batch_size", 12),
            ({"varlen_mock_dataset": "x", "sft_mock_dataset": None}, "unread_settings", ("varlen_mock_dataset",)),
            ({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, "cuda_graph", "full_iteration"),
        ],
    )
    def test_one_setting_declares_one_fact(self, given: dict[str, Any], fact: str, value: object) -> None:
        assert getattr(facts_of(BatchContract.from_megatron(megatron(**given))), fact) == value

    def test_enum_members_are_read_by_their_names(self) -> None:
        modules = [GraphModule.attn, GraphModule.mlp]
        facts = facts_of(BatchContract.from_megatron(megatron(cuda_graph_modules=modules)))
        assert facts.cuda_graph_modules == ("attn", "mlp")

    def test_hybrid_ep_is_told_from_the_other_flex_backends(self) -> None:
        given = {"num_experts": 8, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
        facts = facts_of(BatchContract.from_megatron(megatron(**given)))
        assert (facts.moe_dispatcher, facts.moe_pads_uneven) == (Dispatcher.HYBRID_EP, False)


def named(name: str, **values: Any) -> Any:
    """An object of a class of this name."""
    return type(name, (SimpleNamespace,), {})(**values)


def bridge(dataset: Any = None, **sections: dict[str, Any]) -> SimpleNamespace:
    model = {"seq_length": 4096, "context_parallel_size": 2, "calculate_per_token_loss": True}
    return SimpleNamespace(
        model=SimpleNamespace(**{**model, **sections.get("model", {})}),
        train=SimpleNamespace(**{"micro_batch_size": 1, "global_batch_size": 32, **sections.get("train", {})}),
        ddp=SimpleNamespace(**{"average_in_collective": False, **sections.get("ddp", {})}),
        dist=SimpleNamespace(**{"eval_context_parallel_size": None, **sections.get("dist", {})}),
        validation=SimpleNamespace(**sections.get("validation", {})),
        dataset=dataset or current(),
    )


def current(specs: dict[str, Any] | None = None, **values: Any) -> Any:
    given = {"packed_sequence_size": 4096, "pad_seq_to_mult": 4, "pad_cu_seqlens": False, **(specs or {})}
    defaults = {
        "seq_length": 4096,
        "enable_offline_packing": True,
        "offline_packing_specs": SimpleNamespace(**given),
        "pad_to_max_length": True,
    }
    return named("GPTSFTDatasetConfig", **{**defaults, **values})


def older(**values: Any) -> Any:
    specs = SimpleNamespace(packed_sequence_size=4096, pad_seq_to_mult=4, pad_cu_seqlens=False)
    defaults = {"seq_length": 4096, "packed_sequence_specs": specs, "dataset_kwargs": {"pad_to_max_length": True}}
    return named("FinetuningDatasetConfig", **{**defaults, **values})


def rules_of(cfg: object, world_size: int | None = 2) -> list[str]:
    return [violation.rule for violation in check_bridge(cfg, world_size)]


class TestBridge:
    @pytest.mark.parametrize("dataset", [current(), older()], ids=["current names", "older names"])
    def test_offline_packing_becomes_online_packs(self, dataset: Any) -> None:
        contract = BatchContract.from_megatron_bridge(bridge(dataset))
        assert (contract.packing, contract.seq_length, contract.segment_multiple) == (Packing.ONLINE, 4096, 4)
        assert (contract.pad_to_max_length, contract.pad_cu_seqlens) == (True, False)
        assert (contract.partition, contract.readers) == (Partition.WHOLE, ReaderPolicy.ALL)
        assert contract.objective is Objective.SFT
        facts = facts_of(contract)
        assert (facts.stack, facts.packs_offline, facts.packs_in_batch) == (Stack.MEGATRON_BRIDGE, False, False)
        assert rules_of(bridge(dataset)) == []

    @pytest.mark.parametrize("name", ["enable_in_batch_packing", "pack_sequences_in_batch"])
    def test_packing_in_the_batch_under_both_names(self, name: str) -> None:
        cfg = bridge(named("DirectHFSFTDatasetConfig", seq_length=4096, **{name: True}), train={"micro_batch_size": 4})
        contract = BatchContract.from_megatron_bridge(cfg)
        assert (contract.packing, contract.micro_batch_size, contract.pad_to_max_length) == (Packing.IN_BATCH, 4, None)
        assert rules_of(cfg) == []

    def test_a_pretraining_dataset_is_an_endless_run_and_any_other_one_sample_a_row(self) -> None:
        pretraining = BatchContract.from_megatron_bridge(bridge(named("GPTDatasetConfig", sequence_length=4096)))
        assert (pretraining.packing, pretraining.isolate_documents) == (Packing.CONCAT, False)
        assert pretraining.objective is Objective.PRETRAIN
        own = BatchContract.from_megatron_bridge(bridge(named("OwnProvider", seq_length=4096)))
        assert (own.packing, own.objective) == (Packing.NONE, None)

    def test_a_dataset_derived_from_a_known_one_is_known(self) -> None:
        kind = type("OwnDataset", (type(named("EnergonDatasetConfig")),), {})
        contract = BatchContract.from_megatron_bridge(bridge(kind(seq_length=4096)))
        assert contract.objective is Objective.SFT

    def test_a_size_of_zero_turns_packing_off_under_the_older_names_and_is_refused_under_the_current(self) -> None:
        off = older(packed_sequence_specs=SimpleNamespace(packed_sequence_size=-1))
        assert BatchContract.from_megatron_bridge(bridge(off)).packing is Packing.NONE
        with pytest.raises(ConfigError, match=r"BRIDGE_SPECS: .*packed_sequence_size is 0"):
            BatchContract.from_megatron_bridge(bridge(current({"packed_sequence_size": 0})))

    def test_rows_are_widened_where_bridge_widens_them(self) -> None:
        cfg = bridge(current(pad_to_max_length=False), model={"expert_model_parallel_size": 8})
        assert BatchContract.from_megatron_bridge(cfg).pad_to_max_length is True

    def test_pipelined_packing_in_the_batch_exchanges_shapes(self) -> None:
        dataset = named("DirectHFSFTDatasetConfig", seq_length=4096, enable_in_batch_packing=True)
        cfg = bridge(dataset, model={"pipeline_model_parallel_size": 2}, train={"micro_batch_size": 2})
        assert facts_of(BatchContract.from_megatron_bridge(cfg)).variable_seq_lengths is True
        assert rules_of(cfg, 4) == []

    def test_eager_hybrid_ep_pads_in_the_dispatcher(self) -> None:
        model = {"num_moe_experts": 8, "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
        assert facts_of(BatchContract.from_megatron_bridge(bridge(model=model))).moe_pads_uneven is True
        graph = {**model, "cuda_graph_impl": "transformer_engine"}
        assert facts_of(BatchContract.from_megatron_bridge(bridge(model=graph))).moe_pads_uneven is False

    def test_its_layout(self) -> None:
        model = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
        expected = ParallelLayout(data=2, context=2, tensor=4, sequence_parallel=True)
        assert ParallelLayout.from_megatron_bridge(bridge(model=model), 16) == expected
        known = bridge(model=model)
        known.data_parallel_size = 2
        assert ParallelLayout.from_megatron_bridge(known) == expected

    def test_a_case_says_what_it_could_not_check(self) -> None:
        assert "MODEL_FAMILY" in dict(unchecked(bridge_rule_input(bridge(), 2)))


ENERGON = {"seq_length": 4096, "micro_batch_size": 1, "packing_buffer_size": 16}


def energon(**values: Any) -> Any:
    encoder = named("QwenVLEnergonTaskEncoderConfig")
    return named("EnergonDatasetConfig", **{**ENERGON, "task_encoder": encoder, **values})


def in_batch(**values: Any) -> Any:
    return named("DirectHFSFTDatasetConfig", **{"seq_length": 4096, "enable_in_batch_packing": True, **values})


def provider(name: str, **values: Any) -> Any:
    """A configuration whose model is of a class of this name."""
    cfg = bridge()
    cfg.model = named(name, **{**vars(cfg.model), **values})
    return cfg


class TestCheckBridge:
    @pytest.mark.parametrize(
        ("cfg", "rule"),
        [
            (bridge(current(offline_packing_specs=None)), "BRIDGE_SPECS"),
            (bridge(current(enable_offline_packing=False)), "BRIDGE_SPECS"),
            (bridge(current({"pad_seq_to_mult": 0})), "BRIDGE_SPEC_VALUES"),
            (bridge(current({"max_single_sequence_length": 4097})), "BRIDGE_SPEC_VALUES"),
            (bridge(current(enable_in_batch_packing=True)), "MODES_EXCLUSIVE"),
            (bridge(in_batch(defer_in_batch_packing_to_step=True), train={"micro_batch_size": 4}), "MODES_EXCLUSIVE"),
            (bridge(current(enable_global_batch_packing=True)), "MODES_EXCLUSIVE"),
            (bridge(model={"cuda_graph_impl": "local"}), "BRIDGE_GRAPHS"),
            (bridge(model={"expert_model_parallel_size": 2, "num_moe_experts": None}), "BRIDGE_EXPERTS"),
            (
                bridge(model={"variable_seq_lengths": True, "moe_token_dispatcher_type": "allgather"}),
                "BRIDGE_VARIABLE_LENGTHS",
            ),
            (bridge(train={"rampup_batch_size": [1, 1, 8], "train_samples": 8}), "BRIDGE_RAMP_UP"),
            (bridge(ddp={"average_in_collective": True}), "NO_AVERAGE_IN_COLLECTIVE"),
            (bridge(model={"cp_comm_type": "a2a+p2p", "context_parallel_size": 1}), "CP_HIERARCHY"),
            (bridge(current({"pad_seq_to_mult": 1})), "SEGMENT_ALIGN"),
            (bridge(current(pad_to_multiple_of=-3)), "BRIDGE_SIZES"),
            (bridge(train={"micro_batch_size": 4}), "MBS_ONLINE"),
            (bridge(energon(micro_batch_size=2)), "BRIDGE_ENERGON_SIZES"),
            (bridge(energon(packing_buffer_size=0)), "BRIDGE_SIZES"),
            (bridge(energon(task_encoder=named("HFEnergonTaskEncoderConfig"))), "BRIDGE_ENERGON_PACKING"),
            (bridge(energon(enable_in_batch_packing=True)), "BRIDGE_ENERGON_PACKING"),
            (bridge(energon(), model={"cuda_graph_impl": "local"}), "BRIDGE_ENERGON_PACKING"),
            (bridge(energon(), model={"dist_train": SimpleNamespace(use_dist_train=True)}), "BRIDGE_ENERGON_PACKING"),
            (bridge(model={"cp_comm_type": ["p2p"], "num_layers": 2}), "BRIDGE_LAYERS"),
            (bridge(train={"global_batch_size": None}), "BRIDGE_SIZES"),
            (bridge(validation={"eval_global_batch_size": 3, "eval_micro_batch_size": 2}), "GBS_DIVIDES"),
            (bridge(dist={"eval_context_parallel_size": 4}), "WORLD"),
        ],
    )
    def test_one_wrong_setting_is_found_by_name(self, cfg: object, rule: str) -> None:
        found = check_bridge(cfg, 2)
        assert rule in [violation.rule for violation in errors(found)]
        assert all(violation.remedy for violation in found)

    @pytest.mark.parametrize(
        "cfg",
        [
            bridge(current(defer_in_batch_packing_to_step=True)),
            bridge(train={"rampup_batch_size": [1, 1, 8], "step_batch_size_schedule": None}),
            bridge(train={"decrease_batch_size_if_needed": True}),
            bridge(model={"mtp_num_layers": 1}),
            bridge(energon(), model={"mtp_num_layers": 1}),
            bridge(model={"cp_comm_type": ["p2p"], "num_layers": 2, "context_parallel_size": 1}),
            provider("GPTModelProvider", transformer_impl="local"),
        ],
        ids=["deferred, off", "dead ramp-up", "decrease, divides", "MTP", "MTP, Energon", "layers at CP 1", "provider"],
    )
    def test_what_works_is_not_refused(self, cfg: object) -> None:
        assert errors(check_bridge(cfg, 2)) == []

    def test_a_ramp_up_of_versions_without_the_schedule_is_refused(self) -> None:
        assert rules_of(bridge(train={"rampup_batch_size": [1, 1, 8]})) == ["CONSTANT_STEP"]

    def test_only_datasets_that_have_the_field_are_widened(self) -> None:
        given = {"dataset_kwargs": {"pad_to_max_length": False}}
        specs = SimpleNamespace(packed_sequence_size=4096, pad_seq_to_mult=4, pad_cu_seqlens=True)
        dataset = named(
            "GPTSFTDatasetConfig", seq_length=4096, enable_offline_packing=True, offline_packing_specs=specs
        )
        experts = {"expert_model_parallel_size": 2}
        assert rules_of(bridge(dataset, model=experts)) == ["BRIDGE_WIDTH"]
        vars(dataset).update(given)
        assert "BRIDGE_WIDTH" in rules_of(bridge(dataset, model=experts))
        specs.pad_cu_seqlens = False
        assert BatchContract.from_megatron_bridge(bridge(dataset, model=experts)).pad_to_max_length is False

    @pytest.mark.parametrize(
        ("mixed", "expected"),
        [
            ("bf16_mixed", (False, None, False)),
            ("bf16_with_mxfp8_mixed", (True, "mxfp8", False)),
            ("bf16-with-fp8-current-scaling-mixed", (True, "tensorwise", False)),
            ("bf16_with_nvfp4_mixed", (False, None, True)),
            (SimpleNamespace(fp8="hybrid", fp8_recipe="delayed", fp4=None), (True, "delayed", False)),
            (SimpleNamespace(fp8=None, fp8_recipe="tensorwise", fp4="e2m1"), (False, "tensorwise", True)),
        ],
    )
    def test_the_number_format_is_read_before_launch(self, mixed: Any, expected: tuple[Any, ...]) -> None:
        cfg = bridge()
        cfg.mixed_precision = mixed
        facts = facts_of(BatchContract.from_megatron_bridge(cfg))
        assert (facts.fp8, facts.fp8_recipe, facts.fp4) == expected

    def test_a_family_with_a_provider_of_its_own_is_told_by_its_class(self) -> None:
        refused = check_bridge(provider("Gemma2ModelProvider"), 2)
        assert [(v.rule, v.severity) for v in refused] == [("MODEL_FAMILY", Severity.ERROR)]
        derived = type("OwnGemma2", (type(named("Gemma2ModelProvider")),), {})
        cfg = bridge()
        cfg.model = derived(**vars(cfg.model))
        assert rules_of(cfg) == ["MODEL_FAMILY"]

    @pytest.mark.parametrize("step", ["qwen3_vl_step", "megatron.bridge.models.qwen_vl.qwen3_vl_step"])
    def test_a_step_that_packs_itself_is_refused_by_name(self, step: str) -> None:
        cfg = bridge(in_batch(), train={"micro_batch_size": 4})
        assert [v.rule for v in check_bridge(cfg, 2, step)] == ["PACKED_STEP"]
        assert check_bridge(cfg, 2, "vlm_step") == []
        dense = bridge(in_batch(enable_in_batch_packing=False))
        assert check_bridge(dense, 2, step) == []

    def test_a_step_is_known_by_its_module(self) -> None:
        def forward_step() -> None: ...

        forward_step.__module__ = "megatron.bridge.models.qwen_vl.qwen3_vl_step"
        contract = BatchContract.from_megatron_bridge(bridge(), forward_step)
        assert facts_of(contract).forward_step == "qwen3_vl_step"

    def test_what_only_fine_tuning_breaks_is_a_warning_where_nobody_says_that_it_fine_tunes(self) -> None:
        own = bridge(named("OwnProvider", seq_length=4096), model={"calculate_per_token_loss": False})
        (found,) = check_bridge(own, 2)
        assert (found.rule, found.severity) == ("PER_TOKEN_LOSS", Severity.WARN)

    def test_energon_packing_that_is_right_holds(self) -> None:
        assert rules_of(bridge(energon())) == []

    def test_what_bridge_turns_off_itself_is_a_warning(self) -> None:
        (found,) = check_bridge(bridge(energon(), model={"delay_wgrad_compute": True}), 2)
        assert (found.rule, found.severity) == ("BRIDGE_OVERLAP", Severity.WARN)

    def test_every_rule_of_the_settings_says_when_it_holds(self) -> None:
        assert all(rule.documentation.summary.endswith(".") and rule.id.startswith("BRIDGE_") for rule in BRIDGE_RULES)

    def test_a_world_that_the_sizes_do_not_divide_is_refused(self) -> None:
        assert rules_of(bridge(), 3) == ["WORLD"]

    def test_nothing_of_bridge_megatron_or_torch_is_imported(self) -> None:
        script = "import sys, packhorse.declare; print([n for n in sys.modules if n.startswith(('torch', 'megatron'))])"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )
        assert done.stdout.strip() == "[]"


def mesh(**sizes: int) -> SimpleNamespace:
    shape = tuple(sizes.values())
    return SimpleNamespace(mesh_dim_names=tuple(sizes), shape=shape, mesh=np.arange(int(np.prod(shape))).reshape(shape))


class TestDeviceMesh:
    def test_torchtitans_order_is_megatrons(self) -> None:
        layout = ParallelLayout.from_device_mesh(
            mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=4), sequence_parallel=True
        )
        assert layout == ParallelLayout(data=4, context=2, tensor=4, pipeline=2, sequence_parallel=True)

    def test_another_order_is_kept(self) -> None:
        layout = ParallelLayout.from_device_mesh(mesh(cp=2, dp=3))
        at = mesh(cp=2, dp=3).mesh
        assert layout.coordinates(int(at[1, 2]))[:2] == (2, 1)

    def test_a_dimension_of_size_one_has_any_name(self) -> None:
        assert ParallelLayout.from_device_mesh(mesh(dp=2, ep=1)) == ParallelLayout.from_device_mesh(mesh(dp=2))

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            (mesh(dp=2, ep=2), "'ep'"),
            (mesh(dp_replicate=2, tp=2, dp_shard=2), "beside"),
            (SimpleNamespace(mesh_dim_names=None, shape=(2,)), "mesh_dim_names"),
            (SimpleNamespace(mesh_dim_names=("dp",), shape=(2,), mesh=np.array([1, 0])), "in order"),
        ],
    )
    def test_what_a_layout_cannot_say_is_refused(self, wrong: SimpleNamespace, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            ParallelLayout.from_device_mesh(wrong)


@pytest.fixture
def megatron_state(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"data": 2, "context": 4, "tensor_model": 8, "pipeline_model": 1}
    at = {"data": 1, "context": 2, "tensor_model": 3, "pipeline_model": 0}
    state: Any = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    for name, size in sizes.items():
        setattr(state, f"get_{name}_parallel_world_size", lambda size=size: size)
        setattr(state, f"get_{name}_parallel_rank", lambda at=at[name]: at)
    monkeypatch.setitem(sys.modules, state.__name__, state)


class TestEnvironment:
    def test_data_is_what_the_other_sizes_leave(self) -> None:
        environ = {"RANK": "0", "WORLD_SIZE": "16"}
        layout = ParallelLayout.from_environment(context=2, tensor=4, environ=environ)
        assert layout == ParallelLayout(data=2, context=2, tensor=4)

    def test_slurm_is_asked_after_torchrun_and_one_rank_is_the_last_answer(self) -> None:
        slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
        assert ParallelLayout.from_environment(environ=slurm).data == 8
        assert ParallelLayout.from_environment(environ={}).data == 1

    def test_a_world_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"world size 6 \(from torchrun\) must be a multiple of .* = 4"):
            ParallelLayout.from_environment(context=4, environ={"RANK": "0", "WORLD_SIZE": "6"})

    @pytest.mark.usefixtures("megatron_state")
    def test_megatrons_own_state_is_asked_first(self) -> None:
        layout = ParallelLayout.from_environment(environ={"RANK": "0", "WORLD_SIZE": "3"})
        assert layout == ParallelLayout(data=2, context=4, tensor=8)

    @pytest.mark.usefixtures("megatron_state")
    def test_an_order_that_puts_this_rank_elsewhere_than_megatron_is_refused(self) -> None:
        environ = {"RANK": str(3 + 8 * 2 + 32 * 1), "WORLD_SIZE": "64"}
        assert ParallelLayout.from_environment(environ=environ).context == 4
        with pytest.raises(
            ConfigError, match=r"layout\.order='cp-tp-dp-pp' puts rank 51 at .*Megatron has it at dp1·cp2·tp3"
        ):
            ParallelLayout.from_environment(environ=environ, order="cp-tp-dp-pp")
