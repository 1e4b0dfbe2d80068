"""Megatron-Bridge's own validation and ``check_bridge`` agree on seeded configurations, but for what a list says."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("megatron.bridge.recipes", exc_type=ImportError)

from packhorse.rules import catalog
from packhorse.rules.model import Breach, Rule
from tests.models.stacks.accepted import Accepted, Disagreement, miscounted, unexplained
from tests.models.stacks.bridge_cases import Case, draw
from tests.models.stacks.bridge_verdicts import one_rank, packhorse_refuses, upstream_refuses

SEED = "bridge"
NUM_CASES = 3000
FEW = 800  # enough for a fault that is planted

ACCEPTED = (
    # Packhorse alone refuses --------------------------------------------------------------------------------
    Accepted("CONSTANT_STEP", "a stream has one batch size; Bridge's is set another way", 0.005),
    Accepted(
        "MODES_EXCLUSIVE", "Bridge's steps refuse to pack rows that arrive packed, its validation does not", 0.015
    ),
    Accepted("GRAPH_WIDTH", "a graph needs rows of one width; Bridge looks at offline packs alone", 0.01),
    Accepted("GRAPH_ATTENTION", "a graph of attention needs as many offsets each time; Bridge: offline only", 0.01),
    Accepted("SEQ_LENGTH_MATCH", "a stream's rows are as long as the model is; Bridge pads or trims packs", 0.005),
    Accepted("PACK_ALIGN", "packs that context or sequence parallelism cannot cut; Bridge checks the model's", 0.005),
    Accepted("PP_UNIFORM", "packs of varying width, which stages exchange without shapes; not validated", 0.005),
    Accepted("NO_AVERAGE_IN_COLLECTIVE", "Megatron-FSDP turns averaging off itself while validating", 0.005),
    Accepted("BRIDGE_SPEC_VALUES", "Bridge checks these on construction only, not where they are set later", 0.005),
    Accepted("BRIDGE_ENERGON_PACKING", "this release packs by another owner and has no checks of it yet", 0.005),
    # Bridge alone refuses -------------------------------------------------------------------------------------
    Accepted("fp4 and fp8 cannot be used", "precisions", 0.005),
    Accepted("'NoneType' object is not iterable", "dataset_kwargs of None, where Bridge wants a dictionary", 0.005),
    Accepted("use_megatron_fsdp and use_torch_fsdp2", "sharding of weights", 0.005),
    Accepted("not supported with Megatron FSDP", "sharding of weights", 0.005),
)


def cases() -> list[Case]:
    return [draw(random.Random(f"{SEED}:{index}")) for index in range(NUM_CASES)]


@pytest.fixture(scope="module")
def upstream() -> list[str]:
    """Why Bridge refuses each case, empty where it does not."""
    with one_rank():
        return [upstream_refuses(case.build(), case.world_size) for case in cases()]


def disagreements(upstream: list[str]) -> list[Disagreement]:
    """What the two sides judge differently, with the rules as they are now."""
    found = []
    for case, reason in zip(cases(), upstream, strict=False):
        cfg = case.build()
        rules = packhorse_refuses(cfg, case.world_size)
        if bool(reason) != bool(rules):
            found.append(Disagreement(case, cfg, reason, rules))
    return found


def test_both_refuse_and_accept_the_same_but_for_what_is_listed(upstream: list[str]) -> None:
    found = disagreements(upstream)
    assert [str(one) for one in unexplained(found, ACCEPTED)] == []
    assert miscounted(found, ACCEPTED, NUM_CASES) == []


def test_cases_hold_each_verdict_often(upstream: list[str]) -> None:
    """A generator of nothing but valid, or nothing but broken, configurations would compare little."""
    refused = Counter(map(bool, upstream))
    assert min(refused.values()) > NUM_CASES / 10


@pytest.mark.parametrize("rule", ["GBS_DIVIDES", "PER_TOKEN_LOSS", "MBS_IN_BATCH"])
def test_a_rule_taken_out_is_noticed(upstream: list[str], rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "RULES", tuple(one for one in catalog.RULES if one.id != rule))
    assert any(not one.rules for one in unexplained(disagreements(upstream[:FEW]), ACCEPTED))


def test_a_rule_that_holds_too_often_is_noticed(upstream: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(id="TOO_OFTEN", check=lambda given: iter([Breach("field", "wanted", "got", "remedy")]))
    monkeypatch.setattr(catalog, "RULES", (*catalog.RULES, rule))
    assert any(one.rules for one in unexplained(disagreements(upstream[:FEW]), ACCEPTED))


def test_a_reason_that_no_longer_occurs_is_noticed(upstream: list[str]) -> None:
    found = [one for one in disagreements(upstream) if "MODES_EXCLUSIVE" not in one.rules]
    assert [line for line in miscounted(found, ACCEPTED, NUM_CASES) if line.startswith("MODES_EXCLUSIVE: 0")]
