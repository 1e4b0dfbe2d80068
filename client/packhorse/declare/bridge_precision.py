"""Reading the number format of a Megatron-Bridge job, which ``mixed_precision`` holds until the job is launched.

Bridge copies it into the model's settings when it starts. It is an object, or the name of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse.declare.attributes import get, has
from packhorse.declare.settings import recipe_name

__all__ = ["precision"]

# What a name of Bridge's recipes contains, and what it declares; the first that fits.
NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nvfp4", {"fp8": False, "fp4": True}),
    ("mxfp8", {"fp8": True, "fp8_recipe": "mxfp8", "fp4": False}),
    ("nanov2_bf16_with_fp8", {"fp8": True, "fp8_recipe": "blockwise", "fp4": False}),
    ("fp8_delayed", {"fp8": True, "fp8_recipe": "delayed", "fp4": False}),
    ("fp8_current", {"fp8": True, "fp8_recipe": "tensorwise", "fp4": False}),
    ("fp8_subchannel", {"fp8": True, "fp8_recipe": "blockwise", "fp4": False}),
    ("fp8", {"fp8": True, "fp4": False}),
    ("fp4", {"fp8": False, "fp4": True}),
    ("", {"fp8": False, "fp4": False}),
)


def precision(cfg: object) -> Mapping[str, Any]:
    """Return the facts that ``mixed_precision`` declares; none where it is not set or has no such fields."""
    mixed = get(cfg, "mixed_precision")
    if mixed is None:
        return {}
    if isinstance(mixed, str):
        name = mixed.replace("-", "_").lower()
        return next(facts for part, facts in NAMED if part in name)
    found: dict[str, Any] = {name: bool(get(mixed, name)) for name in ("fp8", "fp4") if has(mixed, name)}
    recipe = get(mixed, "fp8_recipe")
    return found | ({} if recipe is None else {"fp8_recipe": recipe_name(recipe)})
