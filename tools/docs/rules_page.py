"""The reference of the rules, from the rules themselves, and what the trainers' settings declare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packhorse.declare.attributes import FieldSource
from packhorse.declare.bridge_rules import BRIDGE_RULES
from packhorse.declare.settings import BRIDGE_FACTS, BRIDGE_LENGTHS, MEGATRON_CONTRACT, MEGATRON_FACTS
from packhorse.rules import FAMILIES, RULES, RUNTIME_RULES, explain
from packhorse.rules.model import ExplainableRule
from packhorse.rules.transformers_families import FAMILIES_OF_TRANSFORMERS, UNMEASURED, Separation
from tools.docs.markdown import code, table

__all__ = [
    "bridge_rules",
    "contract_rules",
    "declared_settings",
    "model_families",
    "runtime_rules",
    "transformers_families",
]


def contract_rules() -> str:
    """Return the index of the rules about what is declared, and a section for each."""
    return _listed(RULES)


def runtime_rules() -> str:
    """Return the index of the rules that running processes check, and a section for each."""
    return _listed(RUNTIME_RULES)


def _listed(rules: Sequence[ExplainableRule]) -> str:
    rows = (
        [f"[{code(rule.id)}](#{rule.id.lower()})", rule.documentation.summary, str(rule.severity)] for rule in rules
    )
    return table(("id", "holds when", "else"), rows) + "".join(map(_section, rules))


def _section(rule: ExplainableRule) -> str:
    _, body = explain(rule).split("\n\n", 1)
    return f"\n### {rule.id}\n\n{body}\n"


def model_families() -> str:
    """Return the table of the families that do not take packed rows."""
    head = ("family", "not in modes", "objective", "else", "reason", "Megatron-Bridge")
    rows = (
        [row.name, ", ".join(sorted(row.modes)), row.objective or "any", str(row.severity), row.reason, row.source]
        for row in FAMILIES
    )
    return table(head, rows)


def transformers_families() -> str:
    """Return the table of Transformers' families by what they do with packed rows, and those not measured."""
    rows = [[_does(kinds), ", ".join(map(code, families))] for kinds, families in _by_outcome().items()]
    reasons = {reason: [f for f, why in UNMEASURED.items() if why == reason] for reason in UNMEASURED.values()}
    rows += [[f"not measured: {reason}", ", ".join(map(code, families))] for reason, families in reasons.items()]
    return table(("packed rows", "families"), rows)


def _by_outcome() -> dict[tuple[tuple[str, Separation], ...], list[str]]:
    """Group the families by what each attention does."""
    grouped: dict[tuple[tuple[str, Separation], ...], list[str]] = {}
    for family, kinds in FAMILIES_OF_TRANSFORMERS.items():
        grouped.setdefault(tuple(sorted(kinds.items())), []).append(family)
    return dict(sorted(grouped.items()))


def _does(kinds: Sequence[tuple[str, Separation]]) -> str:
    """Say what each attention does."""
    words = {
        Separation.SEPARATE: "kept apart",
        Separation.CROSSES: "trained across: refused",
        Separation.DIFFERS: "computed otherwise than alone: refused",
        Separation.RAISES: "refused by the model itself",
    }
    return "; ".join(f"{words[kind]} ({name})" for name, kind in kinds)


def bridge_rules() -> str:
    """Return the table of what Megatron-Bridge asks of its own settings."""
    return table(("id", "holds when"), ([code(rule.id), rule.documentation.summary] for rule in BRIDGE_RULES))


def declared_settings() -> str:
    """Return what a trainer's own settings declare, field by field, for each trainer."""
    return "\n".join(
        (
            _settings("from_megatron", (*MEGATRON_CONTRACT, *MEGATRON_FACTS)),
            _settings("from_megatron_bridge", (*BRIDGE_LENGTHS, *BRIDGE_FACTS)),
        )
    )


def _settings(name: str, sources: Iterable[FieldSource]) -> str:
    head = ("field", "read from", "where that is there and None")
    rows = ([code(each.field), " or ".join(map(code, each.names)), _without_value(each)] for each in sources)
    return f"## What {code(name)} declares\n\n{table(head, rows)}"


def _without_value(source: FieldSource) -> str:
    return "not declared" if source.off is None else code(source.off)
