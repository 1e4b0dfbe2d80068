"""The report of a check, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from packhorse.rules import Severity
from packhorse_service.check.checks import CheckReport
from packhorse_service.text.formatting import human_bytes

__all__ = ["as_json", "show"]


def as_json(report: CheckReport) -> str:
    """Return one JSON object: ``ok``, ``violations`` and ``derived``; ``streams`` holds one for each further stream."""
    return json.dumps(_plain_report(report), indent=2, ensure_ascii=False)


def _plain_report(report: CheckReport) -> dict[str, Any]:
    violations = [{**asdict(violation), "message": violation.message} for violation in report.violations]
    not_checked = [{"rule": rule, "missing": list(missing)} for rule, missing in report.not_checked]
    derived = {**report.derived, "not_checked": not_checked}
    found = {"ok": report.ok, "violations": violations, "derived": derived}
    further = {name: _plain_report(of_stream) for name, of_stream in report.further.items()}
    return {**found, "streams": further} if further else found


STYLES = {Severity.ERROR: "bold red", Severity.WARN: "yellow"}


def show(report: CheckReport, console: Console) -> None:
    """Print the report for a person."""
    _show_stream(report, console)
    for name, of_stream in report.further.items():
        console.print(f"\n[bold]stream {_plain(name)}[/]", highlight=False)
        _show_stream(of_stream, console)
    console.print("[bold green]the contract holds[/]" if report.ok else "[bold red]the contract does not hold[/]")


def _show_stream(report: CheckReport, console: Console) -> None:
    if report.violations:
        folds = (Column("what is wrong", overflow="fold"), Column("what to change", overflow="fold"))
        table = Table("", Column("rule", no_wrap=True), *folds, show_lines=True)
        for v in report.violations:
            table.add_row(f"[{STYLES[v.severity]}]{v.severity}[/]", v.rule, _plain(v.message), _plain(v.remedy))
        console.print(table)
    facts = Table("follows from the layout", "", show_edge=False)
    for name, value in report.derived.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        shown = human_bytes if name.endswith("_bytes") else str
        for part, each in inner:
            facts.add_row(f"{name.removesuffix('_bytes')} {part}".strip().replace("_", " "), _plain(shown(each)))
    console.print(facts)
    for rule, missing in report.not_checked:
        console.print(f"[dim]not checked: {rule}, as nobody declared {', '.join(missing)}[/]", highlight=False)


def _plain(text: str) -> str:
    """Return a text in which rich reads no markup."""
    return text.replace("[", r"\[")
