"""``packhorse check``: the rules of the handshake, offline, and what follows from a layout.

A report is made once and shown as a table or as JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Column, Table

from packhorse.contract.batch_contract import Packing, ReaderPolicy, ResolvedContract
from packhorse.declare import BRIDGE_RULES
from packhorse.errors import ConfigError
from packhorse.rounding import ceil_div, round_up
from packhorse.rules import (
    RULES,
    RUNTIME_RULES,
    RuleInput,
    Severity,
    Unchecked,
    Violation,
    compare,
    errors,
    explain,
    unchecked,
)
from packhorse.rules.model import ExplainableRule
from packhorse_service.check.memory_bound import (
    MemoryBound,
    local_sizes,
    refuse_over_limit,
    server_memory,
    stream_memory,
)
from packhorse_service.config.serve_config import TRAIN, ServeConfig
from packhorse_service.config.trainer_file import TrainerFile
from packhorse_service.pipeline.all_streams import each_stream
from packhorse_service.pipeline.run import open_tokenizer, resolve_contract
from packhorse_service.planning.balance_window import check_window
from packhorse_service.protocol.derived import derived_values
from packhorse_service.server.authentication import load_clients
from packhorse_service.server.bind_policy import require_private
from packhorse_service.text.formatting import human_bytes

__all__ = [
    "Report",
    "as_json",
    "check_access",
    "check_config",
    "check_streams",
    "explain_rule",
    "fill_bound",
    "load_lengths",
    "show",
]

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, what could not be checked, and what follows from the layout."""

    violations: tuple[Violation, ...]
    not_checked: tuple[Unchecked, ...]
    derived: Mapping[str, Any]
    memory: MemoryBound  # of this stream alone
    further: Mapping[str, Report] = field(default_factory=dict)  # of further streams, by name

    @property
    def ok(self) -> bool:
        """No error, of any stream; warnings do not count."""
        return not errors(list(self.violations)) and all(report.ok for report in self.further.values())


def check_streams(
    config: ServeConfig,
    base: Path,
    trainer: TrainerFile | None = None,
    world_size: int | None = None,
    lengths: Lengths | None = None,
) -> Report:
    """Check a configuration with all its streams; ``lengths`` are of training samples.

    A trainer's file declares the contract of its training; its facts hold for every stream. Raises as
    ``check_config``, and ``ConfigError`` where the server may hold more than ``memory_limit``.
    """
    facts = None if trainer is None else TrainerFile(trainer=trainer.trainer)

    def report(name: str) -> Report:
        if name == TRAIN:
            return check_config(config, base, trainer, world_size, lengths)
        return check_config(config.of_stream(name), base, facts, world_size)

    reports = each_stream(config, report)
    memory = server_memory(report.memory for report in reports.values())
    refuse_over_limit(config, memory)
    first = reports.pop(TRAIN)
    sizes = {
        "memory_bound_bytes": memory.total,
        "memory_bytes": {str(part): size for part, size in memory.parts.items()},
    }
    return replace(first, derived={**first.derived, **sizes}, further=reports)


def check_access(config: ServeConfig, base: Path, *, insecure: bool = False) -> None:
    """Raise ``ConfigError`` where the server would be open to others, or no key may claim the rank of some reader.

    The server's secret need not be on this machine.
    """
    require_private(config.listen, curve=config.curve is not None, insecure=insecure)
    if config.curve is not None:
        clients = load_clients(base / config.curve.clients)
        for name in (TRAIN, *config.streams):
            stream = config.of_stream(name)
            clients.require_readers(stream.layout, stream.contract.readers or ReaderPolicy.ALL, name)


def check_config(
    config: ServeConfig,
    base: Path,
    trainer: TrainerFile | None = None,
    world_size: int | None = None,
    lengths: Lengths | None = None,
) -> Report:
    """Check one stream's configuration, and a trainer that would connect; no shard is read.

    Raises ``ConfigError`` where the contract names no sequence length, batch size or vocabulary, or where a
    planning window makes no sense.
    """
    # The tokenizer is opened only where it must tell the vocabulary.
    tokenizer = None if config.contract.vocab_size else open_tokenizer(config, base)[1]
    layout, contract = config.layout, resolve_contract(config.contract, config.layout, tokenizer)
    reader = trainer or TrainerFile()
    facts = reader.trainer if world_size is None else replace(reader.trainer, world_size=world_size)
    declared = replace(reader.contract, trainer=facts)
    violations = compare(declared, reader.layout or layout, reader.window, contract, layout)
    check_window(config.packing.window, contract)
    derived = derived_values(contract, layout)
    if lengths is not None:
        derived["lengths"] = fill_bound(lengths, contract)
    not_checked = unchecked(RuleInput(layout, contract, facts, reader.window))
    memory = stream_memory(config, base, contract, layout, local_sizes(config, base))
    return Report(tuple(violations), tuple(not_checked), derived, memory)


def load_lengths(path: Path, *, ids: bool = False) -> Lengths:
    """Sample lengths in slots, from a ``.npy`` file of integers. Raises ``ConfigError``.

    ``ids``: the file counts ids, of which the last is only a target.
    """
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {str(path)!r} cannot be read: {error}") from error
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ConfigError(f"--lengths {str(path)!r} must hold one row of integers, the slots of each sample")
    slots = lengths.astype(np.int64)
    return np.maximum(slots - 1, 0) if ids else slots


def fill_bound(lengths: Lengths, contract: ResolvedContract) -> dict[str, Any]:
    """The best share of useful slots that any packing of these samples can reach, and why not all.

    Padding each segment to ``segment_multiple`` bounds it; without packing, each sample fills its own row.
    Samples of no slot, or of more than a row, are counted and left out.
    """
    usable = lengths[(lengths > 0) & (lengths <= contract.seq_length)]
    useful = int(usable.sum())
    if contract.packing is Packing.NONE:
        occupied = len(usable) * contract.seq_length
    else:
        multiple = contract.segment_multiple if contract.packed else 1
        occupied = int(round_up(usable, multiple).sum())
    return {
        "samples": len(lengths),
        "left_out": len(lengths) - len(usable),
        "useful_slots": useful,
        "packs_at_least": ceil_div(occupied, contract.seq_length),
        "useful_fill_at_most": round(useful / occupied, 6) if occupied else 0.0,
    }


def as_json(report: Report) -> str:
    """One JSON object: ``ok``, ``violations`` and ``derived``; ``streams`` holds one for each further stream."""
    return json.dumps(_plain_report(report), indent=2, ensure_ascii=False)


def _plain_report(report: Report) -> dict[str, Any]:
    violations = [{**asdict(violation), "message": violation.message} for violation in report.violations]
    not_checked = [{"rule": rule, "missing": list(missing)} for rule, missing in report.not_checked]
    derived = {**report.derived, "not_checked": not_checked}
    found = {"ok": report.ok, "violations": violations, "derived": derived}
    further = {name: _plain_report(of_stream) for name, of_stream in report.further.items()}
    return {**found, "streams": further} if further else found


STYLES = {Severity.ERROR: "bold red", Severity.WARN: "yellow"}


def show(report: Report, console: Console) -> None:
    """The report for a person."""
    _show_stream(report, console)
    for name, of_stream in report.further.items():
        console.print(f"\n[bold]stream {_plain(name)}[/]", highlight=False)
        _show_stream(of_stream, console)
    console.print("[bold green]the contract holds[/]" if report.ok else "[bold red]the contract does not hold[/]")


def _show_stream(report: Report, console: Console) -> None:
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
    """Without rich reading markup into it."""
    return text.replace("[", r"\[")


def explain_rule(name: str) -> str:
    """Return all that is known of a rule of any kind. Raise ``ConfigError`` with the nearest id where there is none."""
    every: tuple[ExplainableRule, ...] = (*RULES, *RUNTIME_RULES, *BRIDGE_RULES)
    known = {rule.id: rule for rule in every}
    if name.upper() in known:
        return explain(known[name.upper()])
    near = difflib.get_close_matches(name.upper(), known, n=1)
    raise ConfigError(f"no rule {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"))
