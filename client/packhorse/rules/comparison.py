"""The comparison of what a reader relies on with what the server serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from packhorse.contract.batch_contract import BatchContract, ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules.catalog import check
from packhorse.rules.model import RuleInput, Severity, Violation
from packhorse.rules.runtime_rules import RANKS_AGREE

__all__ = ["compare"]

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
LAYOUT_RULE = "WORLD"
SAME = "the same value on both sides"


def _is_multiple(got: int, want: int) -> bool:
    return want % got == 0


# Where more than the same value will do. A model's vocabulary may be larger than the stream's: it is padded for the
# kernels. What is a multiple of the server's alignment is one of its divisors too.
AGREES: Mapping[str, Callable[[Any, Any], bool]] = {
    "vocab_size": lambda got, want: got >= want,
    "segment_multiple": _is_multiple,
    "pack_multiple": _is_multiple,
}
MULTIPLES = frozenset({"segment_multiple", "pack_multiple"})


def compare(
    declared: BatchContract, on: ParallelLayout, window: int | None, served: ResolvedContract, served_on: ParallelLayout
) -> list[Violation]:
    """Return all that stands between a reader and what the server serves: differences, then broken rules.

    What the reader leaves out is not compared, and the rules that need it are silent (``unchecked``).
    """
    names = [f.name for f in fields(served) if not _agrees(f.name, getattr(declared, f.name), getattr(served, f.name))]
    axes = [f.name for f in fields(on) if getattr(on, f.name) != getattr(served_on, f.name)]
    if on.places_as(served_on):
        axes = [name for name in axes if name != "order"]  # it differs where axes of size 1 stand
    return [
        *(
            _difference(FIELD_RULES.get(name, RANKS_AGREE.id), name, getattr(served, name), getattr(declared, name))
            for name in names
        ),
        *(_difference(LAYOUT_RULE, f"layout.{name}", getattr(served_on, name), getattr(on, name)) for name in axes),
        *check(RuleInput(served_on, served, declared.trainer or TrainerFacts(), window)),
    ]


def _agrees(name: str, declared: Any, served: Any) -> bool:
    return declared is None or declared == served or (name in AGREES and AGREES[name](declared, served))


def _difference(rule: str, field: str, want: object, got: object) -> Violation:
    return Violation(
        rule=rule,
        severity=Severity.ERROR,
        field=field,
        want=f"{want} (the server's)" + (" or a divisor of it" if field in MULTIPLES else ""),
        got=str(got),
        remedy=f"set {field} to {'a multiple of ' + str(got) + ' on the server' if field in MULTIPLES else SAME}",
    )
