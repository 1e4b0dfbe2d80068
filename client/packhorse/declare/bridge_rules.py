"""Rules of Megatron-Bridge for its own settings, beyond the contract: checked before a job is launched.

These are not rules of the handshake: they concern settings that a trainer fed by Packhorse does not use, or
that make no declaration. ``check_bridge`` lists what breaks them beside the contract's own violations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packhorse.declare.attributes import get, has
from packhorse.declare.bridge_view import BridgeView, class_names
from packhorse.declare.settings import listed
from packhorse.rules.model import Breach, Documentation, Severity
from packhorse.rules.stack_versions import StackVersions

__all__ = ["BRIDGE_RULES", "BridgeRule"]

QWEN_VL_ENCODER = "QwenVLEnergonTaskEncoderConfig"


@dataclass(frozen=True, slots=True)
class BridgeRule:
    """Rule about a configuration, the counterpart of ``Rule``; the docstring of its check documents it."""

    id: str
    check: Callable[[BridgeView], Iterator[Breach]]
    severity: Severity = Severity.ERROR
    held_against: tuple[StackVersions, ...] = (StackVersions.BRIDGE,)

    @property
    def documentation(self) -> Documentation:
        """Documentation of the rule: when it holds, and why, where that is not plain."""
        return Documentation.parse(self.check.__doc__ or "")

    @property
    def checked(self) -> str:
        """Sentence on who checks it."""
        return "Checked by `packhorse.declare.check_bridge`, before a job is launched."


SIZES = (
    "model.seq_length",
    "dataset.seq_length",
    "dataset.micro_batch_size",
    "dataset.pad_to_multiple_of",
    "dataset.in_batch_packing_pad_to_multiple_of",
    "dataset.packing_buffer_size",
    "train.micro_batch_size",
    "train.global_batch_size",
    "dist.eval_context_parallel_size",
)


def sizes(view: BridgeView) -> Iterator[Breach]:
    """Sizes and multiples are at least 1; a multiple is checked before it is widened, so that -3 is not normalised."""
    for name in SIZES:
        got = get(view.cfg, name)
        if got is not None and got < 1:
            yield Breach(name, "at least 1", str(got), f"set {name} to 1 or more, or leave it out")
    for name in ("train.micro_batch_size", "train.global_batch_size"):
        if get(view.cfg, name) is None:
            yield Breach(name, "a number", "not set", f"set {name}")


def specs(view: BridgeView) -> Iterator[Breach]:
    """Offline packing is enabled with its specs, both or neither, and the specs' values are in range."""
    if view.has_older_names:
        return  # under the older names a size of 0 or below turns packing off
    if view.packs_offline and view.specs is None:
        remedy = "set offline_packing_specs, or enable_offline_packing to false"
        yield Breach("dataset.offline_packing_specs", "set with enable_offline_packing", "not set", remedy)
    if view.specs is None:
        return
    if not view.packs_offline:
        remedy = "set enable_offline_packing to true, or leave offline_packing_specs out"
        yield Breach("dataset.enable_offline_packing", "true with offline_packing_specs", "false", remedy)
    if view.packs_offline and (view.pack_size or 0) < 1:
        remedy = "set packed_sequence_size to model.seq_length"
        yield Breach("offline_packing_specs.packed_sequence_size", "at least 1", str(view.pack_size), remedy)


def spec_values(view: BridgeView) -> Iterator[Breach]:
    """pad_seq_to_mult is at least 1 or left out; max_single_sequence_length is in 1 … packed_sequence_size."""
    multiple = get(view.specs, "pad_seq_to_mult")
    if multiple is not None and multiple < 1:
        remedy = "set pad_seq_to_mult to 2·CP, or leave it out"
        yield Breach("offline_packing_specs.pad_seq_to_mult", "at least 1", str(multiple), remedy)
    longest, size = get(view.specs, "max_single_sequence_length"), view.pack_size or 0
    if longest is not None and not 1 <= longest <= (size if size > 0 else longest):
        field = "offline_packing_specs.max_single_sequence_length"
        yield Breach(field, f"1 … {size}, the pack's size", str(longest), f"set it to {max(size, 1)}, or leave it out")


def energon_sizes(view: BridgeView) -> Iterator[Breach]:
    """An Energon dataset's micro_batch_size is the one of training, and of evaluation where that runs."""
    own, training = get(view.dataset, "micro_batch_size"), get(view.cfg, "train.micro_batch_size")
    if not view.is_energon or own is None:
        return
    evaluation = get(view.cfg, "validation.eval_micro_batch_size") or training
    validates = get(view.dataset, "do_validation") is not False
    for name, want in {"train.micro_batch_size": training, "validation.eval_micro_batch_size": evaluation}.items():
        if want not in (None, own) and (name.startswith("train") or validates):
            remedy = f"set dataset.micro_batch_size to {want}"
            yield Breach("dataset.micro_batch_size", f"{want}, as {name}", str(own), remedy)


def _graph(view: BridgeView, name: str) -> str | None:
    value = get(view.model, name)
    shown = str(getattr(value, "value", value))
    return None if value is None or shown == "none" else shown


# What Energon's own online packing refuses: (setting, what is found where it is refused, wanted).
ENERGON_LIMITS: tuple[tuple[str, Callable[[BridgeView], object], str], ...] = (
    ("dataset.micro_batch_size", lambda v: (get(v.dataset, "micro_batch_size") or 1) > 1, "1"),
    ("model.calculate_per_token_loss", lambda v: not get(v.model, "calculate_per_token_loss"), "true"),
    ("ddp.average_in_collective", lambda v: get(v.cfg, "ddp.average_in_collective"), "false"),
    ("model.cuda_graph_impl", lambda v: _graph(v, "cuda_graph_impl"), "none"),
    ("model.vision_cuda_graph_impl", lambda v: _graph(v, "vision_cuda_graph_impl"), "none"),
    ("model.dist_train.use_dist_train", lambda v: get(v.model, "dist_train.use_dist_train"), "false"),
    (
        "model.pipeline_model_parallel_size",
        lambda v: (get(v.model, "pipeline_model_parallel_size") or 1) > 1,
        "1",
    ),
    ("dataset.enable_in_batch_packing", lambda v: v.packs_in_batch, "false"),
    (
        "dataset.defer_in_batch_packing_to_step",
        lambda v: get(v.dataset, "defer_in_batch_packing_to_step"),
        "false",
    ),
)


def energon_packing(view: BridgeView) -> Iterator[Breach]:
    """Energon's online packing takes one sample row, a per-token loss, the Qwen-VL encoder, and one packing owner."""
    if view.packing_buffer_size is None:
        return
    for name, refused, want in ENERGON_LIMITS:
        if refused(view):
            got = str(get(view.cfg, name)).lower()
            yield Breach(name, f"{want} with packing_buffer_size", got, f"set {name} to {want}")
    encoder = get(view.dataset, "task_encoder")
    if encoder is not None and QWEN_VL_ENCODER not in class_names(encoder):
        remedy = f"use a {QWEN_VL_ENCODER}, or leave packing_buffer_size out"
        yield Breach("dataset.task_encoder", QWEN_VL_ENCODER, type(encoder).__name__, remedy)


def overlap(view: BridgeView) -> Iterator[Breach]:
    """Energon's online packing does not overlap expert-parallel communication: Bridge turns that off, a warning."""
    if view.packing_buffer_size is None:
        return
    for name in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
        for section in ("model", "comm_overlap", "comm_overlap.user_comm_overlap_cfg"):
            if get(view.cfg, f"{section}.{name}"):
                remedy = f"set {name} to false; Bridge does so itself"
                yield Breach(f"{section}.{name}", "false with packing_buffer_size", "true", remedy, Severity.WARN)


def layers(view: BridgeView) -> Iterator[Breach]:
    """With CP > 1 a list of cp_comm_type names one for each layer."""
    if (get(view.model, "context_parallel_size") or 1) == 1:
        return
    kinds, count = get(view.model, "cp_comm_type"), get(view.model, "num_layers")
    if isinstance(kinds, list | tuple) and count is not None and len(kinds) != count:
        remedy = "give one name for all layers, or one for each"
        yield Breach("model.cp_comm_type", f"{count} names, as num_layers", str(len(kinds)), remedy)


def width(view: BridgeView) -> Iterator[Breach]:
    """Offline packing with pad_cu_seqlens or training graphs sets pad_to_max_length itself.

    Bridge looks before it widens rows for pipelines and experts.
    """
    if not view.packs_offline or view.pads_to_max_length or not view.needs_fixed_width:
        return  # without pipelines and experts the contract's own rules say so
    fixed_offsets = get(view.specs, "pad_cu_seqlens")
    graph = _graph(view, "cuda_graph_impl")
    if fixed_offsets or graph in ("transformer_engine", "full_iteration"):
        reason = "pad_cu_seqlens" if fixed_offsets else f"cuda_graph_impl {graph}"
        remedy = "set pad_to_max_length to true (of GPT-SFT: dataset_kwargs)"
        yield Breach("dataset.pad_to_max_length", f"true with {reason}", "not set", remedy)


def graphs(view: BridgeView) -> Iterator[Breach]:
    """Bridge has Megatron's local graphs for the full iteration only, and that without check_for_nan_in_loss."""
    kind = _graph(view, "cuda_graph_impl")
    scopes = listed(get(view.model, "cuda_graph_modules")) + listed(get(view.model, "cuda_graph_scope"))
    whole = kind == "full_iteration" or (kind == "local" and "full_iteration" in scopes)
    inference = {"layer", "block"} & set(listed(get(view.model, "inference_cuda_graph_scope")))
    if kind == "local" and not whole and (set(scopes) - {"full", "full_iteration_inference"} or not inference):
        want = "none, transformer_engine or full_iteration"
        yield Breach("model.cuda_graph_impl", want, "local", "set it to transformer_engine and name the modules")
    if whole and get(view.cfg, "rerun_state_machine.check_for_nan_in_loss"):
        field = "rerun_state_machine.check_for_nan_in_loss"
        yield Breach(field, "false with a graph of the full iteration", "true", f"set {field} to false")


def experts(view: BridgeView) -> Iterator[Breach]:
    """Expert parallelism comes with experts."""
    size = get(view.model, "expert_model_parallel_size") or 1
    if size > 1 and has(view.model, "num_moe_experts") and get(view.model, "num_moe_experts") is None:
        remedy = "set expert_model_parallel_size to 1, or num_moe_experts"
        yield Breach("model.expert_model_parallel_size", "1 without num_moe_experts", str(size), remedy)


def variable_lengths(view: BridgeView) -> Iterator[Breach]:
    """variable_seq_lengths is not set with the all-gather dispatcher, Megatron's default, in dense models either."""
    model = view.model
    by_bridge = get(model, "_enable_in_batch_packing") and (get(model, "pipeline_model_parallel_size") or 1) > 1
    if get(model, "variable_seq_lengths") and not by_bridge and get(model, "moe_token_dispatcher_type") == "allgather":
        remedy = "set moe_token_dispatcher_type to alltoall, or variable_seq_lengths to false"
        yield Breach("model.variable_seq_lengths", "false with allgather", "true", remedy)


def ramp_up(view: BridgeView) -> Iterator[Breach]:
    """rampup_batch_size is left out where training is counted in samples or epochs."""
    counted = [name for name in ("train_samples", "num_epochs") if get(view.cfg, f"train.{name}") is not None]
    if counted and get(view.cfg, "train.rampup_batch_size") is not None:
        remedy = "leave rampup_batch_size out, or count training in train_iters"
        yield Breach("train.rampup_batch_size", f"not set with {counted[0]}", "set", remedy)


BRIDGE_RULES: tuple[BridgeRule, ...] = (
    BridgeRule("BRIDGE_SIZES", sizes),
    BridgeRule("BRIDGE_SPECS", specs),
    BridgeRule("BRIDGE_SPEC_VALUES", spec_values),
    BridgeRule("BRIDGE_ENERGON_SIZES", energon_sizes),
    BridgeRule("BRIDGE_ENERGON_PACKING", energon_packing),
    BridgeRule("BRIDGE_OVERLAP", overlap, Severity.WARN),
    BridgeRule("BRIDGE_LAYERS", layers),
    BridgeRule("BRIDGE_WIDTH", width),
    BridgeRule("BRIDGE_GRAPHS", graphs),
    BridgeRule("BRIDGE_EXPERTS", experts),
    BridgeRule("BRIDGE_VARIABLE_LENGTHS", variable_lengths),
    BridgeRule("BRIDGE_RAMP_UP", ramp_up),
)
