"""Rules about number formats: the widths that their kernels need of a rank's slots."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules.conditions import varies
from packhorse.rules.model import Breach, RuleInput
from packhorse.rules.multiples import near_multiples

__all__ = ["fp8_width"]

# Transformer Engine: what the product of all but the last dimension of an input divides by.
FP8_UNIT = 8
RECIPE_UNITS = {"mxfp8": 32}  # blocks of 32; the other recipes keep FP8_UNIT
NVFP4_UNIT = 16


def _format(facts: TrainerFacts) -> tuple[str, int] | None:
    """Return the name of the format and the unit of a rank's slots; ``None`` in 16 and 32 bits."""
    if facts.fp4:
        return "NVFP4", NVFP4_UNIT
    if not facts.fp8:
        return None
    recipe = (facts.fp8_recipe or "").lower()
    return ("MXFP8" if recipe == "mxfp8" else "FP8"), RECIPE_UNITS.get(recipe, FP8_UNIT)


def fp8_width(given: RuleInput) -> Iterator[Breach]:
    """FP8, MXFP8, NVFP4: the slots of a rank divide by 8, 32, 16, and a row's by the width that the recipe needs.

    A rank has a row's width over CP, and over CP·TP under sequence parallelism; the rows of a dense micro-batch count
    together. The unit belongs into pack_multiple, so that rows of any length keep it.

    Source: Transformer Engine, assert_dim_for_fp8_exec (8), the MXFP8 (32) and NVFP4 (16) quantizers.
    """
    contract, layout, form = given.contract, given.layout, _format(given.trainer)
    if form is None:
        return
    name, unit = form
    share = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    rows = 1 if varies(given) else contract.micro_batch_size
    whole = math.lcm(unit * share // math.gcd(unit * share, rows), given.trainer.fp8_width or 1)
    want = f"a multiple of {whole} slots, for {name} ({unit} a rank)"
    if not varies(given) and contract.seq_length % whole:
        remedy = near_multiples(contract.seq_length, math.lcm(whole, contract.row_multiple))
        yield Breach("seq_length", want, str(contract.seq_length), remedy)
    if varies(given) and contract.row_multiple % whole:
        remedy = f"set pack_multiple to {math.lcm(whole, contract.pack_multiple)}"
        yield Breach("pack_multiple", want, str(contract.pack_multiple), remedy)
