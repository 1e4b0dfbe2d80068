"""Whether a model keeps the samples of packed rows apart: measured on it where it is small, else by its family.

A model's own measurement stands above the table of families, as a configuration may switch kinds of layers: a hybrid
without its recurrent layers, say. The table answers for models that are too large, sharded, or not runnable yet.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers

from packhorse.errors import ConfigError
from packhorse.hf.experiment import make_row, measure
from packhorse.rules.transformers_families import FOUR_ROWS, HELD_AGAINST, Separation, separation_of

__all__ = ["MAX_PARAMETERS", "ModelCheck", "check"]

MAX_PARAMETERS = 500_000_000
"""Largest model that is measured: its six short calls take as long as reading its weights six times."""
WRAPPERS = ("_orig_mod", "module")  # of torch.compile; of data parallelism, FSDP and DeepSpeed
UNPACKED = (
    "train unpacked: contract.packing: none on the server, and Feed(…, contract=BatchContract(packing=Packing.NONE))"
)


@dataclass(frozen=True)
class ModelCheck:
    """Finding about a model: its separation, and how that is known."""

    family: str
    """Its ``config.model_type``, or its class's name where it has none."""
    attention: str
    """Attention implementation that it has."""
    separation: Separation
    """What it does with packed rows."""
    position_rows: int
    """Rows of positions that it takes: 1, or 4 of mRoPE."""
    reason: str
    """How that is known, or why it is not."""

    @property
    def name(self) -> str:
        """Family and attention, for a message."""
        return f"{self.family} with attn_implementation={self.attention}"


def check(model: torch.nn.Module) -> ModelCheck:
    """Check that a causal language model keeps the samples of packed rows apart; once a model and attention.

    A model of at most ``MAX_PARAMETERS``, neither sharded nor on the meta device, is run on a row of 30 ids, as it is:
    in its dtype, on its device; nothing of it changes. Of others the table of families is asked, in the version of
    Transformers that it was held against. What neither answers is a ``UserWarning``: not checked.

    Raises ``ConfigError`` for a model that trains across samples, with its family, its attention and the way out.
    """
    found = _checked(weakref.ref(model), _attention(_config(_unwrapped(model))))
    if found.separation in (Separation.CROSSES, Separation.DIFFERS):
        raise ConfigError(_refusal(found))
    return found


@lru_cache(maxsize=16)
def _checked(reference: weakref.ref[torch.nn.Module], attention: str) -> ModelCheck:
    """Check a model that is alive; warn of what is not known."""
    model = reference()
    if model is None:
        raise ReferenceError("the model is gone")
    found = _examined(_unwrapped(model), attention)
    if found.separation is Separation.UNKNOWN:
        warnings.warn(
            f"not checked: whether {found.name} keeps the samples of packed rows apart ({found.reason}); compare the "
            f"loss of a packed row with its samples' alone on a small model of this family, or {UNPACKED}",
            stacklevel=4,
        )
    return found


def _refusal(found: ModelCheck) -> str:
    what = {
        Separation.CROSSES: "trains across the samples of packed rows",
        Separation.DIFFERS: "computes samples of packed rows otherwise than alone",
    }[found.separation]
    other = "load it with another attn_implementation, if it has one that keeps them apart"
    return f"{found.name} {what} ({found.reason}); {other}, or {UNPACKED}"


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Take off what wraps a model without changing what it computes; adapters stay."""
    while inner := next(_wrapped_in(model), None):
        model = inner
    return model


def _wrapped_in(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if not hasattr(model, "config") or isinstance(model, torch._dynamo.OptimizedModule):
        held = (getattr(model, name, None) for name in WRAPPERS)
        yield from (inner for inner in held if isinstance(inner, torch.nn.Module))


def _config(model: torch.nn.Module) -> Any:
    return getattr(model, "config", None)


def _attention(config: Any) -> str:
    """Name of the attention of the text model, where that has one of its own."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return str(getattr(text, "_attn_implementation", None) or "unnamed")


def _examined(model: torch.nn.Module, attention: str) -> ModelCheck:
    """Measure the model where that is affordable, else look its family up."""
    family = str(getattr(_config(model), "model_type", "") or type(model).__name__)
    rows = 4 if family in FOUR_ROWS else 1
    listed, listed_why = _listed(model, family, attention)
    prevented = _too_costly(model)
    if prevented is None:
        measured, rows, why = _measured(model, rows)
        trusted = listed is not Separation.CROSSES or _is_exact(model)
        if measured is not Separation.UNKNOWN and (trusted or measured is not Separation.SEPARATE):
            return ModelCheck(family, attention, measured, rows, why)
        prevented = why
    if listed is Separation.UNKNOWN:
        listed_why = f"{prevented}; {listed_why}"
    return ModelCheck(family, attention, listed, rows, listed_why)


def _is_exact(model: torch.nn.Module) -> bool:
    """Return whether the model's dtype shows small crossings."""
    return all(p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.is_floating_point())


def _listed(model: Any, family: str, attention: str) -> tuple[Separation, str]:
    """Look the family up: what the table says of it, and why."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    prompts = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    # fully_shard gives a model a class above its own; a class derived from Transformers' may compute anything
    own = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
    if prompts or not own.__module__.startswith("transformers.models."):
        return Separation.UNKNOWN, f"{own.__name__} is not one of Transformers' own models"
    separation, why = separation_of(family, attention)
    if separation is Separation.SEPARATE and transformers.__version__ != HELD_AGAINST:
        return Separation.UNKNOWN, f"the table of families was held against transformers {HELD_AGAINST}"
    return separation, why


def _too_costly(model: torch.nn.Module) -> str | None:
    """Say why a model is not measured; ``None`` where it can be."""
    parameters = list(model.parameters())
    if not parameters:
        return "it has no parameters"
    if any(p.is_meta or hasattr(p, "ds_id") or isinstance(p, torch.distributed.tensor.DTensor) for p in parameters):
        return "its parameters are sharded or not loaded yet"
    if any(hasattr(m, "_fsdp_wrapped_module") or hasattr(m, "_is_fsdp_managed_module") for m in model.modules()):
        return "its parameters are sharded"
    count = sum(p.numel() for p in parameters)
    return None if count <= MAX_PARAMETERS else f"of its size, {count:,} parameters, only the table is asked"


def _measured(model: torch.nn.Module, rows: int) -> tuple[Separation, int, str]:
    """Run the experiment with the family's rows of positions, then with the other number: what is found, and how."""
    row = make_row(_text_ids(model))
    tried = []
    for position_rows in (rows, 5 - rows):
        try:
            measured = measure(model, row, position_rows)
        except Exception as error:  # noqa: BLE001 - whatever a model may raise; it is told
            tried.append((Separation.UNKNOWN, rows, f"running it raised {type(error).__name__}: {error}"))
            continue
        share = max(measured.crossing, measured.difference)
        why = f"measured on it: another sample's logits move by {share:.2g} of the changed one's"
        tried.append((measured.separation, position_rows, why))
        if measured.separation is Separation.SEPARATE:
            return tried[-1]
    return tried[0]


def _text_ids(model: torch.nn.Module) -> torch.Tensor:
    """Return ids [N] that stand for text: no image's placeholder, no padding."""
    config: Any = _config(model)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    special = set(_special_ids(config.to_dict())) if hasattr(config, "to_dict") else set()
    size = int(getattr(text, "vocab_size", 0)) or _embedded(model)
    return torch.tensor([i for i in range(min(size, 1000)) if i not in special])


def _embedded(model: Any) -> int:
    """Return the number of ids that a model without a vocabulary in its configuration embeds."""
    return int(model.get_input_embeddings().num_embeddings)


def _special_ids(config: Any) -> Iterator[int]:
    """Yield every integer of a configuration whose name says that it is an id."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif str(name).endswith(("_token_id", "_token_index", "_token_ids")):
            yield from (i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
