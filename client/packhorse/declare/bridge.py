"""Declaring a Megatron-Bridge job from its ConfigContainer, and checking one before it is launched.

``settings`` lists what is read, field by field. The packing of its dataset becomes the mode of the stream:

| dataset | mode |
|---|---|
| ``enable_offline_packing`` (``packed_sequence_specs`` before) | ``online``, of ``packed_sequence_size`` slots |
| ``packing_buffer_size`` (Energon) | ``online`` |
| ``enable_in_batch_packing`` (``pack_sequences_in_batch`` before) | ``in_batch`` |
| a pretraining dataset | ``concat``, not isolated |
| any other | ``none`` |

Two of them at once stay a fact of the trainer, which ``MODES_EXCLUSIVE`` refuses. The kind of a dataset is told
by the name of its class or of a base of it. Every rank reads, and Bridge's steps cut rows themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packhorse.contract.batch_contract import BatchContract, LossReduction, Packing, ReaderPolicy, resolve
from packhorse.contract.layout import DEFAULT_ORDER, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.declare.attributes import get, read_fields
from packhorse.declare.bridge_precision import precision
from packhorse.declare.bridge_rules import BRIDGE_RULES
from packhorse.declare.bridge_steps import TEXT_STEP, stage_facts
from packhorse.declare.bridge_view import BridgeView, class_names
from packhorse.declare.megatron import PIPELINE_FIRST, layout_from_sizes, model_ranks
from packhorse.declare.settings import BRIDGE_FACTS, BRIDGE_LENGTHS, ignores_ramp_up, trainer_facts, unread_settings
from packhorse.errors import ConfigError
from packhorse.rules import RuleInput, Violation, check, errors
from packhorse.rules.lengths import ID_LIMIT, gbs_divides
from packhorse.rules.model import Breach, Severity

__all__ = ["bridge_rule_input", "check_bridge", "contract_from_megatron_bridge", "layout_from_megatron_bridge"]


def layout_from_megatron_bridge(cfg: object, world_size: int | None = None) -> ParallelLayout:
    """Read the layout of the model's sizes; DP is ``data_parallel_size`` once set, else what the world size leaves.

    ``dist.use_tp_pp_dp_mapping`` gives the order of ranks, but with ``dist.use_decentralized_pg``, where Bridge builds
    its groups in the default order whatever the mapping is (Megatron-Bridge 0.6.2, training/initialize.py).
    """
    model = get(cfg, "model")
    ranks = world_size or BridgeView(cfg).world_size
    data = get(cfg, "data_parallel_size") if world_size is None else None
    mapped = get(cfg, "dist.use_tp_pp_dp_mapping") and not get(cfg, "dist.use_decentralized_pg")
    order = PIPELINE_FIRST if mapped else DEFAULT_ORDER
    return layout_from_sizes(model, data or max(1, (ranks or 1) // model_ranks(model)), order)


def contract_from_megatron_bridge(cfg: object, forward_step: object = None) -> BatchContract:
    """Declare what a Megatron-Bridge job relies on; ``forward_step``: its training step, or the name of its module.

    Raises ``ConfigError`` that lists what is wrong with the settings themselves.
    """
    broken = errors(_broken_settings(cfg))
    if broken:
        raise ConfigError("the Megatron-Bridge configuration:\n" + "\n".join(f"  {v}" for v in broken))
    return _declare(BridgeView(cfg), forward_step)


def _declare(view: BridgeView, forward_step: object = None) -> BatchContract:
    declared = {**read_fields(view.cfg, BRIDGE_LENGTHS), **_shapes(view)}
    if view.packs_offline and (view.pack_size or 0) > 0:
        declared["seq_length"] = view.pack_size
    return BatchContract(
        **{name: value for name, value in declared.items() if not _invalid_size(value)},
        packing=view.packing,
        isolate_documents=False if view.packing is Packing.CONCAT else None,
        partition=Partition.WHOLE,
        readers=ReaderPolicy.ALL,
        objective=view.objective,
        trainer=_facts(view, forward_step),
    )


def _invalid_size(value: object) -> bool:
    """Return whether a size is below 1: ``BRIDGE_RULES`` names it, with the setting's own name."""
    return isinstance(value, int) and not isinstance(value, bool) and value < 1


def _shapes(view: BridgeView) -> dict[str, Any]:
    """Return what fixes widths and offsets; dense rows are padded whatever the settings say."""
    if not view.packed:
        return {}
    fixed = view.pads_to_max_length
    if fixed is not None and view.forces_fixed_width:
        fixed = True
    return {
        "pad_to_max_length": fixed,
        "pad_cu_seqlens": get(view.specs, "pad_cu_seqlens") if view.packs_offline else None,
        "segment_multiple": get(view.specs, "pad_seq_to_mult") if view.packs_offline else None,
    }


def _uses_megatron_ddp(view: BridgeView) -> bool:
    """Return whether averaging is Megatron's DDP's: Megatron-FSDP turns it off itself, with symmetric registration."""
    fsdp = get(view.cfg, "dist.use_megatron_fsdp") or get(view.cfg, "ddp.use_megatron_fsdp")
    turned_off = fsdp and not get(view.cfg, "ddp.disable_symmetric_registration")
    return not (get(view.cfg, "dist.use_torch_fsdp2") or turned_off)


def _step_name(view: BridgeView, forward_step: object) -> str | None:
    """Return the module of the training step; a configuration holds none, but MegatronMIMO has its own alone."""
    if isinstance(forward_step, str):
        return forward_step.rsplit(".", 1)[-1]
    module = getattr(forward_step, "__module__", None)
    if forward_step is not None and module is not None:
        return str(module).rsplit(".", 1)[-1]
    return MIMO_STEP if MIMO_PROVIDER in class_names(view.model) else None


def _facts(view: BridgeView, forward_step: object) -> TrainerFacts:
    declared = {"stack": Stack.MEGATRON_BRIDGE, "clamps_zero_loss": True, **read_fields(view.cfg, BRIDGE_FACTS)}
    declared |= {"model_family": view.model_family, **precision(view.cfg)}
    declared["megatron_ddp"] = _uses_megatron_ddp(view)
    # One way of packing became the stream's mode; a second one beside it packs again.
    declared["packs_offline"] = False
    declared["packs_in_batch"] = view.packs_global_batch or (
        view.packs_in_batch and view.packing is not Packing.IN_BATCH
    )
    step = declared["forward_step"] = _step_name(view, forward_step)
    declared["defers_packing"] = view.defers_packing and step != TEXT_STEP  # which packs nothing itself
    declared["unread_settings"] = (unread_settings(view.model) + unread_settings(view.dataset)) or None
    if ignores_ramp_up(view.cfg, "train."):
        declared["rampup_batch_size"] = False
    if view.chooses_attention:
        declared.pop("transformer_impl", None)
    declared |= stage_facts(view, step)
    if view.packing is Packing.IN_BATCH and get(view.model, "pipeline_model_parallel_size") not in (None, 1):
        declared["variable_seq_lengths"] = True  # Bridge turns it on for such a job
    return trainer_facts(view.model, declared, pads_when_eager=True)


MIMO_PROVIDER, MIMO_STEP = "MegatronMIMOProvider", "megatron_mimo_step"
# Rules that an averaged loss breaks where the job fine-tunes, and only there.
OF_FINE_TUNING = frozenset({"PER_TOKEN_LOSS", "NO_AVERAGE_IN_COLLECTIVE"})
OF_THE_STREAM = frozenset({"pack_multiple"})
REQUIRED = {"seq_length": "model.seq_length", "global_batch_size": "train.global_batch_size"}


def bridge_rule_input(cfg: object, world_size: int | None = None, forward_step: object = None) -> RuleInput:
    """Return what the rules see of a Megatron-Bridge configuration, served as it asks to be.

    ``world_size``: ranks of the job, where the configuration does not know it yet. Raises ``ConfigError``
    where no sequence length or batch size is set.
    """
    view = BridgeView(cfg)
    declared, layout = _declare(view, forward_step), layout_from_megatron_bridge(cfg, world_size)
    if view.packs_offline and declared.pad_to_max_length is None:
        # A trainer that says nothing is served either width. Bridge itself takes it as "no", but the stream may do
        # what pipelines and experts need.
        declared = replace(declared, pad_to_max_length=view.needs_fixed_width)
    if declared.pad_cu_seqlens and declared.max_segments is None:
        # Bridge takes the number from the metadata of the packs, which no configuration holds: any will do.
        declared = replace(declared, max_segments=declared.seq_length)
    lengths = {name: getattr(declared, name) for name in REQUIRED}
    missing = [REQUIRED[name] for name, value in lengths.items() if value is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be set, to 1 or more")
    contract = resolve(declared, layout, **lengths, vocab_size=declared.vocab_size or ID_LIMIT)
    facts = declared.trainer or TrainerFacts()
    return RuleInput(layout, contract, replace(facts, world_size=world_size or view.world_size))


def check_bridge(cfg: object, world_size: int | None = None, forward_step: object = None) -> list[Violation]:
    """Check a Megatron-Bridge configuration before it is launched; nothing of Bridge or torch is imported.

    All violations at once: of the settings themselves (``BRIDGE_…``), of the training contract, and of the
    evaluation's batch sizes. ``world_size``: ranks of the job, where the configuration does not know it yet.
    ``forward_step``: the training step, or the name of its module, which no configuration holds.

    Where the class of the dataset does not tell whether the job fine-tunes, what only fine-tuning breaks is a warning;
    so is what the stream sets (pack_multiple) and no configuration of Bridge does.
    """
    broken = _broken_settings(cfg)
    if any(violation.field in REQUIRED.values() for violation in broken):
        return broken  # without these there is no contract to check
    case = bridge_rule_input(cfg, world_size, forward_step)
    known = BridgeView(cfg).objective is not None or case.contract.loss_reduction is not LossReduction.MEAN
    found = [
        replace(each, severity=Severity.WARN) if each.field in OF_THE_STREAM or _in_doubt(each, known) else each
        for each in check(case)
    ]
    return broken + found + _evaluation(cfg, case)


def _in_doubt(violation: Violation, known: bool) -> bool:
    return not known and violation.rule in OF_FINE_TUNING


def _broken_settings(cfg: object) -> list[Violation]:
    view = BridgeView(cfg)
    return [_violation(rule.id, breach) for rule in BRIDGE_RULES for breach in rule.check(view)]


def _evaluation(cfg: object, training: RuleInput) -> list[Violation]:
    """Batch sizes of the evaluation on its own layout: its context-parallel size changes DP."""
    contract, layout = training.contract, training.layout
    context, ranks = contract.evaluation_context, layout.data * layout.context
    if ranks % context:
        want = f"a divisor of DP·CP = {ranks}"
        remedy = f"set it to {layout.context}, or leave it out"
        return [_violation("WORLD", Breach("dist.eval_context_parallel_size", want, str(context), remedy))]
    sizes = {
        name: get(cfg, f"validation.eval_{name}", f"train.eval_{name}") or getattr(contract, name)
        for name in ("micro_batch_size", "global_batch_size")
    }
    case = RuleInput(replace(layout, context=context, data=ranks // context), replace(contract, **sizes))
    return [
        _violation("GBS_DIVIDES", breach._replace(field=f"validation.eval_{breach.field}"))
        for breach in gbs_divides(case)
        if case != RuleInput(layout, contract)
    ]


def _violation(rule: str, breach: Breach) -> Violation:
    field, want, got, remedy, severity = breach
    return Violation(rule=rule, severity=severity or Severity.ERROR, field=field, want=want, got=got, remedy=remedy)
