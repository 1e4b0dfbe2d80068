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
    Accepted("CONSTANT_STEP", "a stream has one batch size; Bridge ignores rampup_batch_size", 0.06),
    Accepted("MODES_EXCLUSIVE", "Bridge's steps refuse to pack rows that arrive packed, its validation does not", 0.03),
    Accepted("MTP", "Bridge's guide says that packed data does not go with it, its validation does not", 0.02),
    Accepted("THD_BACKEND", "the local attention cannot read offsets; Bridge's provider takes another one", 0.01),
    Accepted("FP8_WIDTH", "Transformer Engine's kernels refuse such rows, no validation does", 0.02),
    Accepted("BRIDGE_LAYERS", "Bridge compares the lengths under context parallelism alone", 0.015),
    Accepted("GRAPH_WIDTH", "a graph needs rows of one width; Bridge looks at offline packs alone", 0.01),
    Accepted("GRAPH_ATTENTION", "a graph of attention needs as many offsets each time; Bridge: offline only", 0.01),
    Accepted("SEQ_LENGTH_MATCH", "a stream's rows are as long as the model is; Bridge pads or trims packs", 0.005),
    Accepted("SEGMENT_ALIGN", "segments that context parallelism cannot cut; Bridge's packs are cut wrongly", 0.005),
    Accepted("PACK_ALIGN", "packs that context or sequence parallelism cannot cut; Bridge checks the model's", 0.005),
    Accepted("NO_AVERAGE_IN_COLLECTIVE", "Megatron-FSDP turns averaging off itself while validating", 0.005),
    Accepted("BRIDGE_SPEC_VALUES", "Bridge checks these on construction only, not where they are set later", 0.005),
    Accepted("BRIDGE_ENERGON_PACKING", "this release packs by another owner and has no checks of it yet", 0.005),
    Accepted("MBS_ONLINE", "packed by Energon, a row is a micro-batch", 0.005),
    Accepted("VARIABLE_DISPATCH", "in-batch rows vary in width; Bridge looks only where stages exchange them", 0.01),
    # Bridge alone refuses -------------------------------------------------------------------------------------
    Accepted("allgather does not support variable sequence length", "a dense model's default dispatcher", 0.02),
    Accepted("Cannot average in collective", "a sum per token averaged over ranks; no rule of it without CP yet", 0.01),
    Accepted("num_moe_experts must be non None", "the model's own sizes", 0.02),
    Accepted('cuda_graph_impl="local"', "Bridge has no graphs of Megatron's own layers, whatever the data", 0.02),
    Accepted("hierarchical_context_parallel_sizes", "without context parallelism nothing is exchanged", 0.02),
    Accepted("fp4 and fp8 cannot be used", "precisions", 0.005),
    Accepted("check_for_nan_in_loss", "a setting of fault handling", 0.01),
    Accepted("'NoneType' object is not iterable", "dataset_kwargs of None, where Bridge wants a dictionary", 0.005),
    Accepted("cuda graph is only supported for", "modules that the model does not have", 0.005),
    Accepted("use_megatron_fsdp and use_torch_fsdp2", "sharding of weights", 0.005),
    Accepted("not supported with Megatron FSDP", "sharding of weights", 0.005),
    Accepted("pad_cu_seqlens=True requires", "forced to the full width by pipeline stages or experts", 0.005),
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
    found = [one for one in disagreements(upstream) if "CONSTANT_STEP" not in one.rules]
    assert [line for line in miscounted(found, ACCEPTED, NUM_CASES) if line.startswith("CONSTANT_STEP: 0")]
