"""The page of the rules, written from the rules."""

from __future__ import annotations

from collections.abc import Iterable

from packhorse.declare.attributes import FieldSource
from packhorse.declare.bridge_rules import BRIDGE_RULES
from packhorse.declare.settings import BRIDGE_FACTS, BRIDGE_LENGTHS, MEGATRON_CONTRACT, MEGATRON_FACTS
from packhorse.rules.catalog import RULES
from packhorse.rules.families import FAMILIES
from packhorse.rules.model import Rule

__all__ = ["explain", "page"]

HEAD = """# The rules of the contract

Written by `python -m packhorse.rules > docs/rules.md` from the code; a test keeps it in step.

`packhorse check` and the handshake check the same rules, and list every violation at once: rule, field, what was
wanted, what was found, and what to change. An *error* refuses a reader; a *warning* is reported to both sides. A rule
that holds says nothing. One that needs a fact which nobody declared stays silent and is listed as "not checked".
"""
READ = "\n## What {name} declares\n\n| field | read from | where that is there and None |\n|---|---|---|\n"


def explain(rule: Rule) -> str:
    """All that is known of one rule, as text."""
    needs = f"Needs the trainer's {', '.join(rule.needs)}." if rule.needs else ""
    source = f"Source: {rule.source}" if rule.source else ""
    parts = (f"{rule.id} ({rule.severity})", rule.summary, rule.reason, needs, source)
    return "\n\n".join(part for part in parts if part)


def page() -> str:
    """``docs/rules.md``."""
    index = "\n".join(f"| [`{rule.id}`](#{rule.id.lower()}) | {rule.summary} | {rule.severity} |" for rule in RULES)
    families = "\n".join(
        f"| {row.name} | {', '.join(sorted(row.modes))} | {row.objective or 'any'} | {row.severity} | {row.reason} "
        f"| {row.source} |"
        for row in FAMILIES
    )
    bridge = "\n".join(f"| `{rule.id}` | {rule.summary} |" for rule in BRIDGE_RULES)
    parts = [
        HEAD,
        f"\n| id | holds when | else |\n|---|---|---|\n{index}\n",
        *(_section(rule) for rule in RULES),
        "\n## Model families\n\n| family | not in modes | objective | else | reason | Megatron-Bridge |\n"
        f"|---|---|---|---|---|---|\n{families}\n",
        "\n## Settings of Megatron-Bridge\n\nChecked by `packhorse.declare.check_bridge` besides the rules above.\n"
        f"\n| id | holds when |\n|---|---|\n{bridge}\n",
        _read("from_megatron", (*MEGATRON_CONTRACT, *MEGATRON_FACTS)),
        _read("from_megatron_bridge", (*BRIDGE_LENGTHS, *BRIDGE_FACTS)),
    ]
    return "".join(parts)


def _section(rule: Rule) -> str:
    _, body = explain(rule).split("\n\n", 1)
    return f"\n### {rule.id}\n\n{body}\n"


def _read(name: str, sources: Iterable[FieldSource]) -> str:
    rows = "".join(
        f"| `{source.field}` | {' or '.join(f'`{n}`' for n in source.names)} | {_off(source)} |\n" for source in sources
    )
    return READ.format(name=f"`{name}`") + rows


def _off(source: FieldSource) -> str:
    return "not declared" if source.off is None else f"`{source.off}`"
