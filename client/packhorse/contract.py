"""What both sides must agree on for a micro-batch to be right.

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

from packhorse.context_parallel import Partition
from packhorse.errors import ConfigError
from packhorse.layout import ParallelLayout

__all__ = [
    "BatchContract",
    "LossReduction",
    "Objective",
    "Packing",
    "Remainder",
    "ResolvedContract",
    "TailPadding",
    "resolve",
]


class Packing(StrEnum):
    """How samples become rows."""

    ONLINE = "online"  # packs built on the fly over a lookahead


class TailPadding(StrEnum):
    """What the padding behind the last sample of a row is."""

    OWN_SEGMENT = "own_segment"  # a segment of logical length 0 whose positions restart
    EXTEND_LAST = "extend_last"  # the last physical segment grows, no further offset


class Objective(StrEnum):
    """What the job trains."""

    SFT = "sft"
    PRETRAIN = "pretrain"


class LossReduction(StrEnum):
    """How the trainer divides the summed loss."""

    PER_TOKEN = "per_token"  # the stack divides by the tokens of all ranks (Megatron: calculate_per_token_loss)
    STEP_TOKENS = "step_tokens"  # the loop divides by MicroBatch.step_loss_tokens
    MEAN = "mean"  # each micro-batch is averaged on its own


class Remainder(StrEnum):
    """What happens to the packs of a finite stream that do not fill a step."""

    PAD = "pad"  # the step is filled with fillers; every target is delivered
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchContract:
    """What one side declares. ``None`` means "not declared": nothing is guessed from it.

    Lengths and multiples count slots. ``global_batch_size`` counts packs.
    """

    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    packing: Packing | None = None
    partition: Partition | None = None
    segment_multiple: int | None = None
    pack_multiple: int | None = None
    pad_to_max_length: bool | None = None
    tail_padding: TailPadding | None = None
    objective: Objective | None = None
    loss_reduction: LossReduction | None = None
    remainder: Remainder | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        for name, enum in ENUMS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _member(enum, name, value))
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigError(f"contract.{name}={size!r} must be an integer of at least 1")
        for name, kind in SCALARS.items():
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                raise ConfigError(f"contract.{name}={value!r} must be {WORDS[kind]}")

    def digest(self, layout: ParallelLayout) -> bytes:
        """16 bytes that are equal when two readers declare the same contract and layout."""
        declared = [(f.name, getattr(self, f.name)) for f in fields(self)]
        sizes = [(f.name, getattr(layout, f.name)) for f in fields(layout)]
        return blake2b(msgpack.packb([declared, sizes]), digest_size=16).digest()


SIZES = ("seq_length", "micro_batch_size", "global_batch_size", "segment_multiple", "pack_multiple", "vocab_size")
SCALARS: dict[str, type] = {"pad_id": int, "ignore_index": int, "pad_to_max_length": bool}
WORDS: dict[type, str] = {int: "an integer", bool: "true or false"}
ENUMS: dict[str, type[StrEnum]] = {
    "packing": Packing,
    "partition": Partition,
    "tail_padding": TailPadding,
    "objective": Objective,
    "loss_reduction": LossReduction,
    "remainder": Remainder,
}


def _member(enum: type[StrEnum], name: str, value: str) -> StrEnum:
    if value not in list(enum):
        raise ConfigError(f"contract.{name}={value!r} must be one of {', '.join(enum)}")
    return enum(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedContract:
    """A ``BatchContract`` with every field decided; the same names."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    packing: Packing
    partition: Partition
    segment_multiple: int
    pack_multiple: int
    pad_to_max_length: bool
    tail_padding: TailPadding
    objective: Objective
    loss_reduction: LossReduction
    remainder: Remainder
    vocab_size: int
    pad_id: int
    ignore_index: int

    @property
    def row_multiple(self) -> int:
        """What a row's width is a multiple of."""
        return math.lcm(self.segment_multiple, self.pack_multiple)

    def num_microbatches(self, layout: ParallelLayout) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * layout.data)


def default_segment_multiple(layout: ParallelLayout, partition: Partition) -> int:
    """Megatron-Bridge's alignment of a segment: lcm(2·CP if CP > 1, CP·TP under sequence parallel)."""
    return math.lcm(partition.granularity(layout.context), default_pack_multiple(layout))


def default_pack_multiple(layout: ParallelLayout) -> int:
    """What sequence parallelism needs of a whole row: CP·TP, or 1 without it."""
    return layout.context * layout.tensor if layout.sequence_parallel and layout.tensor > 1 else 1


def resolve(
    declared: BatchContract, layout: ParallelLayout, *, seq_length: int, global_batch_size: int, vocab_size: int
) -> ResolvedContract:
    """Fill what ``declared`` leaves open. The three lengths that have no default are given by name."""
    partition = declared.partition or Partition.WHOLE
    defaults: dict[str, object] = {
        "micro_batch_size": 1,
        "packing": Packing.ONLINE,
        "partition": partition,
        "segment_multiple": default_segment_multiple(layout, partition),
        "pack_multiple": default_pack_multiple(layout),
        "pad_to_max_length": True,
        "tail_padding": TailPadding.OWN_SEGMENT,
        "objective": Objective.SFT,
        "loss_reduction": LossReduction.STEP_TOKENS,
        "remainder": Remainder.PAD,
        "pad_id": 0,
        "ignore_index": -100,
    }
    given = {f.name: getattr(declared, f.name) for f in fields(declared) if getattr(declared, f.name) is not None}
    needed = {"seq_length": seq_length, "global_batch_size": global_batch_size, "vocab_size": vocab_size}
    return ResolvedContract(**{**defaults, **given, **needed})
