"""The batch contract: all that both sides must agree on for a micro-batch to be right.

A side *declares* a ``BatchContract``: any field may be left out, and what is left out is not compared.
The server *resolves* its own declaration against the layout into a ``ResolvedContract``, in which every
field has a value; it sends it with WELCOME. The rules that make a contract valid are in ``rules``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from hashlib import blake2b

import msgpack

from packhorse.contract.documented import documented
from packhorse.contract.field_checks import as_member, require_type
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ConfigError

__all__ = [
    "IGNORE_INDEX",
    "AttentionOffsets",
    "BatchContract",
    "LossReduction",
    "Objective",
    "Packing",
    "ReaderPolicy",
    "Remainder",
    "ResolvedContract",
    "TailPadding",
    "resolve",
]

IGNORE_INDEX = -100  # the label that PyTorch's cross entropy leaves out, if it is told no other


class Packing(StrEnum):
    """Mode in which samples become rows."""

    ONLINE = "online"
    """Packs are built on the fly over a lookahead."""
    IN_BATCH = "in_batch"
    """``micro_batch_size`` consecutive samples are flattened to one row."""
    CONCAT = "concat"
    """Pretraining: documents come one after the other, cut where a row ends."""
    NONE = "none"
    """Every sample is a row of its own, dense."""


class TailPadding(StrEnum):
    """Form of the padding behind the last sample of a row."""

    OWN_SEGMENT = "own_segment"
    """A segment of its own, of logical length 0, whose positions restart."""
    EXTEND_LAST = "extend_last"
    """Part of the last physical segment, which grows; there is no further offset."""


class ReaderPolicy(StrEnum):
    """Policy that says which ranks connect (``readers`` in the configuration)."""

    ALL = "all"
    """Every rank reads."""
    TENSOR_ZERO = "tensor_zero"
    """Tensor rank 0 reads and broadcasts, as in stock Megatron-LM."""
    TENSOR_ZERO_EDGES = "tensor_zero_edges"
    """The same in the dense modes: only the first and last pipeline stages, and those with MTP layers, read."""


class AttentionOffsets(StrEnum):
    """Kind of offsets that adapters give to attention, for the whole job."""

    PHYSICAL = "physical"
    """Physical offsets alone: exact for causal attention, and every kernel stays available."""
    LOGICAL = "logical"
    """Logical offsets beside physical ones, for models that are not causal."""


class Objective(StrEnum):
    """Kind of training that a job does."""

    SFT = "sft"
    """Supervised fine-tuning: a loss mask says which tokens count."""
    PRETRAIN = "pretrain"
    """Pretraining: every token counts."""


class LossReduction(StrEnum):
    """Denominator by which the trainer divides the summed loss."""

    PER_TOKEN = "per_token"
    """The stack divides by the tokens of all ranks (Megatron's ``calculate_per_token_loss``)."""
    STEP_TOKENS = "step_tokens"
    """The loop divides by ``MicroBatch.step_loss_tokens``."""
    MEAN = "mean"
    """Each micro-batch is averaged on its own."""


class Remainder(StrEnum):
    """Treatment of the packs at the end of a finite stream that do not fill a step."""

    PAD = "pad"
    """The step is filled up with fillers: every target is delivered."""
    DROP = "drop"
    """They are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContract:
    """Declaration of one side. A field that is left out (``None``) is not declared: nothing is guessed from it.

    Lengths and multiples count slots. ``global_batch_size`` counts packs in ``online`` and ``concat``,
    samples in ``in_batch`` and ``none``. ``trainer`` holds facts about the trainer itself: rules read
    them, the two sides do not compare them. The fields are listed in ``docs/configuration.md``, the
    rules that make a contract valid in ``docs/rules.md``.

    Raises ``ConfigError`` for a value of another kind: a size below 1, an unknown name, a number for a flag.
    """

    seq_length: int | None = documented("Slots of a row; in `in_batch`, of the longest sample.")
    micro_batch_size: int | None = documented(
        "1 in `online` and isolated `concat`; samples or rows of a micro-batch else."
    )
    global_batch_size: int | None = documented(
        "Packs (`online`), rows (`concat`) or samples of a step, over all ranks."
    )
    packing: Packing | None = documented("How samples become rows.")
    isolate_documents: bool | None = documented("`concat`: attention stays within a document; false: one run of ids.")
    partition: Partition | None = documented(
        "Who cuts rows for context-parallel ranks: the trainer (`whole`), or the server."
    )
    readers: ReaderPolicy | None = documented("Which coordinates connect.")
    evaluation_context: int | None = documented("Context-parallel size of evaluations, where it differs.")
    segment_multiple: int | None = documented("Each segment is padded to a multiple of this.")
    pack_multiple: int | None = documented("Each row is a multiple of this wide: what kernels or FP8 need.")
    static_shapes: bool | None = documented(
        "Sets pad_to_max_length and pad_cu_seqlens, for CUDA graphs; needs max_segments."
    )
    pad_to_max_length: bool | None = documented("Every row has the same width.")
    pad_cu_seqlens: bool | None = documented("A fixed number of offsets: max_segments + 2.")
    max_segments: int | None = documented("Segments of a row at most.")
    tail_padding: TailPadding | None = documented(
        "What the padding behind the last sample is: a segment, or part of the last."
    )
    objective: Objective | None = documented("What the job trains.")
    loss_reduction: LossReduction | None = documented("How the trainer divides the summed loss.")
    remainder: Remainder | None = documented(
        "What becomes of packs at the end that fill no step: filled up, or left out."
    )
    attention_offsets: AttentionOffsets | None = documented("Which offsets adapters give to attention.")
    padding_mask: bool | None = documented("Deliver `MicroBatch.padding_mask`.")
    vocab_size: int | None = documented("Vocabulary size; ids must be below. Up to 65,536, ids travel as 16 bits.")
    pad_id: int | None = documented("The token of padding.")
    ignore_index: int | None = documented("The label of padding.")
    trainer: TrainerFacts | None = documented("Facts about the trainer, for the rules.")

    def __post_init__(self) -> None:
        for name, enum in ENUMS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_member(enum, f"contract.{name}", value))
        _check_sizes(self)
        for name, kind in SCALARS.items():
            value = getattr(self, name)
            if value is not None:
                require_type(kind, f"contract.{name}", value)

    @staticmethod
    def from_megatron(args: object, packing: Packing | None = None) -> BatchContract:
        """Declare what a Megatron-LM job relies on, from its argument namespace after ``validate_args``.

        With ``--sft`` samples are packed ``online``, without it documents are ``concat`` and not isolated;
        ``packing`` says so where it is neither. What is read of the arguments, field by field, is listed in
        ``docs/rules.md``.
        """
        from packhorse.declare.megatron import contract_from_megatron

        return contract_from_megatron(args, packing)

    @staticmethod
    def from_megatron_bridge(cfg: object, forward_step: object = None) -> BatchContract:
        """Declare what a Megatron-Bridge job relies on, from its ConfigContainer; the dataset says how it packs.

        ``forward_step``: its training step, or the name of its module; some steps take no packed rows.
        What is read of the configuration, field by field, is listed in ``docs/rules.md``. Raises ``ConfigError``
        that lists what is wrong with the settings themselves.
        """
        from packhorse.declare.bridge import contract_from_megatron_bridge

        return contract_from_megatron_bridge(cfg, forward_step)

    def digest(self, layout: ParallelLayout) -> bytes:
        """Return 16 bytes that are equal where two readers declare the same contract and layout."""
        parts: list[BatchContract | ParallelLayout | TrainerFacts] = [self, layout]
        parts += [] if self.trainer is None else [self.trainer]
        declared = [(f.name, getattr(part, f.name)) for part in parts for f in fields(part) if f.name != "trainer"]
        return blake2b(msgpack.packb(declared), digest_size=16).digest()


SIZES = (
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "evaluation_context",
    "segment_multiple",
    "pack_multiple",
    "max_segments",
    "vocab_size",
)
FLAGS = ("isolate_documents", "static_shapes", "pad_to_max_length", "pad_cu_seqlens", "padding_mask")
SCALARS: dict[str, type] = {"pad_id": int, "ignore_index": int, **dict.fromkeys(FLAGS, bool)}
ENUMS: dict[str, type[StrEnum]] = {
    "packing": Packing,
    "partition": Partition,
    "readers": ReaderPolicy,
    "attention_offsets": AttentionOffsets,
    "tail_padding": TailPadding,
    "objective": Objective,
    "loss_reduction": LossReduction,
    "remainder": Remainder,
}


def _check_sizes(contract: object) -> None:
    for name in SIZES:
        size = getattr(contract, name)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"contract.{name}={size!r} must be an integer of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedContract:
    """Contract with every field decided: a ``BatchContract`` of the same names, resolved against a layout."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    packing: Packing
    isolate_documents: bool
    partition: Partition
    readers: ReaderPolicy
    evaluation_context: int
    segment_multiple: int
    pack_multiple: int
    static_shapes: bool
    pad_to_max_length: bool
    pad_cu_seqlens: bool
    max_segments: int | None
    tail_padding: TailPadding
    objective: Objective
    loss_reduction: LossReduction
    remainder: Remainder
    attention_offsets: AttentionOffsets
    padding_mask: bool
    vocab_size: int
    pad_id: int
    ignore_index: int

    def __post_init__(self) -> None:
        _check_sizes(self)

    @property
    def packed(self) -> bool:
        """True where rows hold several segments and travel with their offsets; dense rows do not."""
        return self.packing in (Packing.ONLINE, Packing.IN_BATCH) or (
            self.packing is Packing.CONCAT and self.isolate_documents
        )

    @property
    def concatenated(self) -> bool:
        """True where rows are cut from one endless run of ids, whatever documents they belong to."""
        return self.packing is Packing.CONCAT and not self.isolate_documents

    @property
    def max_width(self) -> int:
        """Slots of the widest row."""
        return self.seq_length * (self.micro_batch_size if self.packing is Packing.IN_BATCH else 1)

    @property
    def fixed_width(self) -> bool:
        """True where every packed row has the same number of slots."""
        return self.pad_to_max_length

    @property
    def row_multiple(self) -> int:
        """Slots that the width of a row is a multiple of."""
        return math.lcm(self.segment_multiple, self.pack_multiple)

    def num_microbatches(self, layout: ParallelLayout) -> int:
        """Return the number of micro-batches of one data-parallel rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * layout.data)


def default_segment_multiple(layout: ParallelLayout, partition: Partition, evaluation_context: int) -> int:
    """Return the slots that Megatron-Bridge aligns a segment to, over training and evaluation.

    They are the lcm over both context-parallel sizes of 2·CP (CP where rows are cut contiguously), if CP > 1, and of
    CP·TP under sequence parallelism, if TP > 1.
    """
    sizes = (layout.context, evaluation_context)
    return math.lcm(*map(partition.granularity, sizes), default_pack_multiple(layout, evaluation_context))


def default_pack_multiple(layout: ParallelLayout, evaluation_context: int) -> int:
    """Return the slots that sequence parallelism needs a row to be a multiple of: CP·TP, or 1 without it."""
    if not layout.sequence_parallel or layout.tensor == 1:
        return 1
    return math.lcm(layout.context * layout.tensor, evaluation_context * layout.tensor)


def resolve(
    declared: BatchContract, layout: ParallelLayout, *, seq_length: int, global_batch_size: int, vocab_size: int
) -> ResolvedContract:
    """Fill what a declaration leaves open. The three lengths that have no default are given by name.

    Rules are not checked. Raises ``ConfigError`` for a length below 1.
    """
    partition = declared.partition or Partition.WHOLE
    evaluation_context = declared.evaluation_context or layout.context
    static = bool(declared.static_shapes)
    defaults: dict[str, object] = {
        "micro_batch_size": 1,
        "packing": Packing.ONLINE,
        "isolate_documents": True,
        "partition": partition,
        "readers": ReaderPolicy.ALL,
        "evaluation_context": evaluation_context,
        "segment_multiple": default_segment_multiple(layout, partition, evaluation_context),
        "static_shapes": False,
        "pad_to_max_length": static or declared.packing is not Packing.IN_BATCH,
        "pad_cu_seqlens": static,
        "max_segments": None,
        "tail_padding": TailPadding.OWN_SEGMENT,
        "objective": Objective.SFT,
        "loss_reduction": LossReduction.STEP_TOKENS,
        "remainder": Remainder.PAD,
        "attention_offsets": AttentionOffsets.PHYSICAL,
        "padding_mask": False,
        "pad_id": 0,
        "ignore_index": IGNORE_INDEX,
    }
    names = [f.name for f in fields(ResolvedContract)]
    given = {name: getattr(declared, name) for name in names if getattr(declared, name) is not None}
    needed = {"seq_length": seq_length, "global_batch_size": global_batch_size, "vocab_size": vocab_size}
    # A row is wide enough for sequence parallelism whatever else it is asked to be a multiple of.
    wide = math.lcm(declared.pack_multiple or 1, default_pack_multiple(layout, evaluation_context))
    return ResolvedContract(**{**defaults, **given, **needed, "pack_multiple": wide})
