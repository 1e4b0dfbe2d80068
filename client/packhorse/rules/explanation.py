"""A rule explained, as text."""

from __future__ import annotations

from packhorse.rules.model import ExplainableRule

__all__ = ["explain"]


def explain(rule: ExplainableRule) -> str:
    """Return all that is known of one rule: id and severity, when it holds, why, what it needs, source, versions."""
    summary, reason, source = rule.documentation
    versions = "; ".join(rule.held_against)
    parts = (
        f"{rule.id} ({rule.severity})",
        summary,
        reason,
        rule.checked,
        f"Source: {source}" if source else "",
        f"Held against: {versions}." if versions else "",
    )
    return "\n\n".join(part for part in parts if part)
