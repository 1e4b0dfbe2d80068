"""Every rule id that a user can meet is explained, on the command line and in the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from packhorse.contract.batch_contract import BatchContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.declare import BRIDGE_RULES
from packhorse.rules import RULES, RUNTIME_RULES, compare
from packhorse.rules.comparison import FIELD_RULES, LAYOUT_RULE
from packhorse.rules.model import ExplainableRule
from packhorse_service.check.checks import explain_rule

ROOT = Path(__file__).parents[3]
EVERY: tuple[ExplainableRule, ...] = (*RULES, *RUNTIME_RULES, *BRIDGE_RULES)
IDS = {rule.id for rule in EVERY}

# Where a ``Violation`` is built from a rule, or from an id that its function is given.
BUILDERS = {
    "client/packhorse/rules/model.py": 2,  # Rule, RuntimeRule
    "client/packhorse/rules/comparison.py": 1,  # FIELD_RULES, LAYOUT_RULE
    "client/packhorse/declare/bridge.py": 1,  # BRIDGE_RULES, and ids of RULES
}
AN_ID_AND_A_TEXT = re.compile(r"^([A-Z]{2,}(?:_[A-Z0-9]+)+): ")


def product() -> Iterator[tuple[str, ast.Module]]:
    """(path from the repository, parsed) of every module of the product."""
    for folder in ("client/packhorse", "service/packhorse_service"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def test_ids_are_given_once() -> None:
    assert len(IDS) == len(EVERY)


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.id)
def test_a_rule_is_explained_on_the_command_line_and_in_the_documentation(rule: ExplainableRule) -> None:
    explained = explain_rule(rule.id.lower())
    assert explained.startswith(f"{rule.id} ({rule.severity})")
    assert rule.documentation.summary in explained
    assert f"| {rule.documentation.summary} |" in (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("rule", RUNTIME_RULES, ids=lambda rule: rule.id)
def test_a_rule_of_running_processes_says_who_checks_it_and_why(rule: ExplainableRule) -> None:
    assert rule.checked.startswith("Checked by ")
    assert rule.documentation.summary.endswith(".")
    assert rule.documentation.reason
    assert rule.documentation.source


def test_violations_are_built_from_rules_alone() -> None:
    """Whoever adds another place to build one makes sure here that its ids are catalogued."""
    built = {path: sum(called(node, "Violation") for node in ast.walk(module)) for path, module in product()}
    assert {path: count for path, count in built.items() if count} == BUILDERS


def test_an_id_that_is_written_out_where_a_violation_is_built_is_catalogued() -> None:
    calls = (node for _, module in product() for node in ast.walk(module) if called(node, "_violation"))
    first = (call.args[0] for call in calls if isinstance(call, ast.Call))
    written = {ast.literal_eval(argument) for argument in first if isinstance(argument, ast.Constant)}
    assert written
    assert written <= IDS
    assert {*FIELD_RULES.values(), LAYOUT_RULE} <= IDS


def test_an_error_that_begins_with_an_id_begins_with_a_catalogued_one() -> None:
    texts = (
        node.value
        for _, module in product()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    begins = {found[1] for text in texts if (found := AN_ID_AND_A_TEXT.match(text))}
    assert {"THD_ROWS", "REPLAY_DIVERGED"} <= begins
    assert begins <= IDS


SERVED_ON = ParallelLayout(data=2)
SERVED = resolve(BatchContract(), SERVED_ON, seq_length=4096, global_batch_size=8, vocab_size=50_257)


def another(value: Any) -> Any:
    """A value of the same type, of a field of a contract."""
    if isinstance(value, StrEnum):
        return next(each for each in type(value) if each is not value)
    return not value if isinstance(value, bool) else (value or 2) * 2 + 1


@pytest.mark.parametrize("name", [f.name for f in fields(SERVED)])
def test_whatever_differs_between_the_two_sides_is_named_by_a_catalogued_id(name: str) -> None:
    declared = {f.name: getattr(SERVED, f.name) for f in fields(SERVED)}
    declared[name] = another(declared[name])
    if name == "vocab_size":
        declared[name] = SERVED.vocab_size - 1  # a larger one agrees
    found = compare(BatchContract(**declared), SERVED_ON, None, SERVED, SERVED_ON)
    assert [violation.field for violation in found] == [name]
    assert {violation.rule for violation in found} <= IDS


def test_another_layout_is_named_by_a_catalogued_id() -> None:
    found = compare(BatchContract(), replace(SERVED_ON, data=4), None, SERVED, SERVED_ON)
    assert {violation.rule for violation in found} <= IDS
