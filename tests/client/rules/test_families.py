"""The table of model families: each row refuses or warns in its modes, and in no other."""

from __future__ import annotations

import pytest

from packhorse.contract.batch_contract import BatchContract, Objective, Packing, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import FAMILIES, Family, RuleInput, Severity, Violation, check

# research's table of opt-outs, by name: hard rows are refusals in the family's own code.
HARD = {
    "qwen3-omni",
    "nemotron-vl-v2",
    "qwen2.5-omni",
    "qwen3-asr",
    "nemotron-labs-diffusion",
    "step3.7",
    "gemma2",
}
RECIPE = {
    "qwen3-next",
    "glm-4.5",
    "qwen3.5-vl",
    "deepseek-v4",
    "kimi-k2.5-vl",
    "glm-4.5v",
    "gemma3-vl",
    "qwen2-audio",
    "qwen3-vl",
    "ministral3",
    "exaone-4.5",
    "nemotron-nano-v2-vl",
    "nemotron-omni",
}


def found(family: str | None, packing: Packing, objective: Objective = Objective.SFT) -> list[Violation]:
    layout = ParallelLayout()
    mbs = 2 if packing is Packing.IN_BATCH else 1
    declared = BatchContract(packing=packing, objective=objective, micro_batch_size=mbs)
    contract = resolve(declared, layout, seq_length=512, global_batch_size=8, vocab_size=100)
    return check(RuleInput(layout, contract, TrainerFacts(model_family=family)))


def test_the_table_has_a_row_for_each_family_that_opts_out() -> None:
    by_severity = {severity: {row.name for row in FAMILIES if row.severity is severity} for severity in Severity}
    assert by_severity == {Severity.ERROR: HARD, Severity.WARN: RECIPE}
    assert len(FAMILIES) == len(HARD | RECIPE)


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_family_is_named_in_its_modes_only(row: Family, packing: Packing) -> None:
    violations = found(row.name, packing)
    if packing not in row.modes:
        assert violations == []
        return
    (violation,) = violations
    assert (violation.rule, violation.severity) == ("MODEL_FAMILY", row.severity)
    assert row.reason in violation.want
    assert row.source in violation.remedy


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_the_mode_that_the_remedy_names_is_taken(row: Family) -> None:
    for packing in row.modes:
        (violation,) = found(row.name, packing)
        proposed = violation.remedy.removeprefix("set packing to ").split()[0]
        assert found(row.name, Packing(proposed)) == []


@pytest.mark.parametrize("row", [row for row in FAMILIES if row.objective], ids=lambda row: row.name)
def test_a_recipe_of_fine_tuning_says_nothing_of_pretraining(row: Family) -> None:
    assert all(found(row.name, packing, Objective.PRETRAIN) == [] for packing in row.modes)


@pytest.mark.parametrize("spelling", ["qwen3_omni", "Qwen3 Omni", "QWEN3-OMNI"])
def test_a_family_is_found_however_it_is_spelled(spelling: str) -> None:
    assert [v.rule for v in found(spelling, Packing.ONLINE)] == ["MODEL_FAMILY"]


@pytest.mark.parametrize("family", [None, "llama3"])
def test_a_family_that_is_not_declared_or_not_in_the_table_is_not_guessed(family: str | None) -> None:
    assert all(found(family, packing) == [] for packing in Packing)
