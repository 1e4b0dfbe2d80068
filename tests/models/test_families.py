"""Every language model of Transformers, tiny: what it does with packed rows is what the table says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from packhorse.hf.experiment import make_row, measure
from packhorse.rules.transformers_families import (
    FAMILIES_OF_TRANSFORMERS,
    FOUR_ROWS,
    HELD_AGAINST,
    UNMEASURED,
    Separation,
)
from tests.models.tiny_models import ATTENTIONS, VARIANTS, build, families, outcome_of

pytestmark = [
    pytest.mark.skipif(transformers.__version__ != HELD_AGAINST, reason=f"the table is that of {HELD_AGAINST}"),
    pytest.mark.filterwarnings("ignore"),  # Transformers' own, of configurations with odd numbers
]
IDS = torch.arange(3, 97)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny products are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_family_is_measured_or_named_with_a_reason() -> None:
    assert sorted({*FAMILIES_OF_TRANSFORMERS, *UNMEASURED}) == families()


@pytest.mark.parametrize("family", sorted(FAMILIES_OF_TRANSFORMERS))
def test_a_family_does_with_packed_rows_what_the_table_says(family: str) -> None:
    found = {attention: outcome_of(family, attention) for attention in ATTENTIONS}
    measured = {attention: kind for attention, (kind, _, _) in found.items() if kind is not Separation.UNKNOWN}
    assert measured == FAMILIES_OF_TRANSFORMERS[family], found


# What the experiment must see -----------------------------------------------------------------------------


def measured(model: Any, position_rows: int = 1) -> Separation:
    return measure(model, make_row(IDS), position_rows).separation


def spoiled(model: Any, **changes: Any) -> Any:
    """``model``, with arguments of every call changed."""
    inner = model.forward

    def forward(**kwargs: Any) -> Any:
        return inner(**{**kwargs, **{name: change(kwargs) for name, change in changes.items()}})

    model.forward = forward
    return model


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_model_that_is_not_told_of_its_samples_crosses(attention: str) -> None:
    whole_row = spoiled(build("llama", attention, {}), position_ids=lambda _: None)
    assert measured(whole_row) is Separation.CROSSES


def test_a_mask_of_ones_crosses() -> None:
    masked = spoiled(build("llama", "sdpa", {}), attention_mask=lambda kwargs: torch.ones_like(kwargs["input_ids"]))
    assert measured(masked) is Separation.CROSSES


def test_a_cache_crosses() -> None:
    assert measured(spoiled(build("llama", "sdpa", {}), use_cache=lambda _: True)) is Separation.CROSSES


def test_positions_shifted_by_one_differ() -> None:
    def shifted(kwargs: dict[str, Any]) -> Any:
        return kwargs["position_ids"] + ("cu_seq_lens_q" in kwargs)

    assert measured(build("gpt2", "sdpa", {})) is Separation.SEPARATE
    assert measured(spoiled(build("gpt2", "sdpa", {}), position_ids=shifted)) is Separation.DIFFERS


def test_a_border_shifted_by_one_crosses() -> None:
    def shifted(kwargs: dict[str, Any]) -> Any:
        return kwargs["position_ids"].roll(1, -1) if "cu_seq_lens_q" in kwargs else kwargs["position_ids"]

    assert measured(spoiled(build("llama", "sdpa", {}), position_ids=shifted)) is Separation.CROSSES


def test_a_model_whose_logits_ignore_its_input_proves_nothing() -> None:
    model = build("llama", "sdpa", {})
    torch.nn.init.zeros_(model.lm_head.weight)
    assert measured(model) is Separation.UNKNOWN


@pytest.mark.parametrize("family", sorted(FOUR_ROWS & set(FAMILIES_OF_TRANSFORMERS)))
def test_three_equal_rows_of_positions_hide_the_samples(family: str) -> None:
    """Proof that these families need the fourth row, and that the table could not be shorter."""
    for changes in VARIANTS:
        try:
            model = build(family, min(FAMILIES_OF_TRANSFORMERS[family]), changes)
            assert measured(model, position_rows=4) is Separation.SEPARATE
        except (RuntimeError, ValueError, TypeError, KeyError, AssertionError, AttributeError):
            continue
        assert measured(model, position_rows=1) is Separation.CROSSES
        return
    pytest.fail("it was not built")
