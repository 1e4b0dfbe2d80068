"""Megatron-Bridge's own validation and ``check_bridge`` agree on seeded configurations, but for what a list says."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("megatron.bridge.recipes", exc_type=ImportError)

from packhorse.rules import catalog
from packhorse.rules.model import Breach, Rule
from tests.models.stacks.accepted import COMMON, Accepted, Disagreement, miscounted, unexplained
from tests.models.stacks.bridge_cases import Case, draw
from tests.models.stacks.bridge_verdicts import one_rank, packhorse_refuses, upstream_refuses

SEED = "bridge"
NUM_CASES = 3000
FRESH = 1000  # of each other seed, of which each side may refuse 1 % alone
FEW = 800  # enough for a fault that is planted


def energon_packs(found: Disagreement) -> bool:
    return getattr(found.cfg.dataset, "packing_buffer_size", None) is not None


ACCEPTED = (
    # Packhorse alone refuses --------------------------------------------------------------------------------
    Accepted("CONSTANT_STEP", "a stream has one batch size; Bridge's is set another way", 0.005),
    Accepted(
        "SEGMENT_ALIGN",
        "segments that 2·CP does not divide: Transformer Engine's kernel cuts them elsewhere, nobody validates it",
        0.005,
    ),
    Accepted("SEQ_LENGTH_MATCH", "a stream's rows are as long as the model is; Bridge pads or trims packs", 0.005),
    Accepted("PACK_ALIGN", "packs that context or sequence parallelism cannot cut; Bridge checks the model's", 0.005),
    Accepted(
        "PP_UNIFORM",
        "packs of varying width, where stages exchange no shapes: they receive model.seq_length slots; not validated",
        0.005,
    ),
    Accepted(
        "BRIDGE_ENERGON_PACKING",
        "this release hands packing_buffer_size to Energon, whose encoders here do not pack: no validation",
        0.005,
    ),
    Accepted("MBS_ONLINE", "the same: Energon would pack, and a pack is a micro-batch of one", 0.005, energon_packs),
    Accepted("MODES_EXCLUSIVE", "the same: Energon would pack beside the batch", 0.005, energon_packs),
    # Bridge alone refuses -------------------------------------------------------------------------------------
    Accepted("fp4 and fp8 cannot be used", "precisions", 0.005),
    Accepted("'NoneType' object is not iterable", "dataset_kwargs of None, where Bridge wants a dictionary", 0.005),
    Accepted("use_megatron_fsdp and use_torch_fsdp2", "sharding of weights", 0.005),
    Accepted("not supported with Megatron FSDP", "sharding of weights", 0.005),
)


def cases(seed: str = SEED, count: int = NUM_CASES) -> list[Case]:
    return [draw(random.Random(f"{seed}:{index}")) for index in range(count)]


def refusals(drawn: list[Case]) -> list[str]:
    """Why Bridge refuses each case, empty where it does not."""
    with one_rank():
        return [upstream_refuses(case.build(), case.world_size, case.step) for case in drawn]


@pytest.fixture(scope="module")
def upstream() -> list[str]:
    return refusals(cases())


def disagreements(upstream: list[str], seed: str = SEED) -> list[Disagreement]:
    """What the two sides judge differently, with the rules as they are now."""
    found = []
    for case, reason in zip(cases(seed, len(upstream)), upstream, strict=True):
        cfg = case.build()
        rules = packhorse_refuses(cfg, case.world_size, case.step)
        if bool(reason) != bool(rules):
            found.append(Disagreement(case, cfg, reason, rules))
    return found


def test_both_refuse_and_accept_the_same_but_for_what_is_listed(upstream: list[str]) -> None:
    found = disagreements(upstream)
    assert [str(one) for one in unexplained(found, ACCEPTED)] == []
    assert miscounted(found, ACCEPTED, NUM_CASES) == []


@pytest.mark.parametrize("seed", ["777", "4242", "99"])
def test_reasons_are_of_kinds_and_hold_for_other_seeds(seed: str) -> None:
    """A list that was fitted to its own seed would leave others unexplained."""
    found = disagreements(refusals(cases(seed, FRESH)), seed)
    assert [str(one) for one in unexplained(found, ACCEPTED)] == []
    alone = Counter(bool(one.rules) for one in found)
    assert max(alone.values()) <= FRESH / 100


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
    gone = Accepted("GONE", "a rule that was mended", COMMON)
    assert miscounted(disagreements(upstream), (gone,), NUM_CASES) == [
        f"GONE: 0 of {NUM_CASES}, expected 1 … 30: {gone.reason}"
    ]
