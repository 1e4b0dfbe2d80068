"""Facts of a trainer check themselves, so that a mistake is named where it is made."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse import ConfigError, TrainerFacts
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, Stack


def test_choices_may_be_given_as_text_and_are_members_then() -> None:
    texts: dict[str, Any] = {"stack": "megatron_lm", "cuda_graph": "local", "moe_dispatcher": "flex"}
    facts = TrainerFacts(**texts)
    assert facts.stack is Stack.MEGATRON_LM
    assert facts.cuda_graph is CudaGraph.LOCAL
    assert facts.moe_dispatcher is Dispatcher.FLEX


@pytest.mark.parametrize(
    ("fact", "value", "rule"),
    [
        ("stack", "megatron", "one of megatron_lm, "),
        ("stack", 1, "one of megatron_lm, "),
        ("cuda_graph", "all", "one of none, "),
        ("moe_dispatcher", "", "one of allgather, "),
        ("world_size", "8", "an integer"),
        ("world_size", True, "an integer"),
        ("fp8_width", 16.0, "an integer"),
        ("fp8", 1, "true or false"),
        ("sft", "yes", "true or false"),
        ("model_family", 3, "text"),
        ("cuda_graph_modules", "attn", "a tuple, of which each is text"),
        ("cuda_graph_modules", (1,), "a tuple, of which each is text"),
        ("hierarchical_cp_sizes", [2, 4], "a tuple, of which each is an integer"),
        ("hierarchical_cp_sizes", (2, "4"), "a tuple, of which each is an integer"),
    ],
)
def test_a_fact_of_another_kind_is_refused_by_name(fact: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerFacts(**{fact: value})  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"trainer.{fact}={value!r} must be {rule}")


def test_nothing_has_to_be_declared() -> None:
    assert TrainerFacts() == TrainerFacts(stack=None, world_size=None)
