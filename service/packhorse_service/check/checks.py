"""``packhorse check``: the rules of the handshake, offline, and what follows from a layout.

A ``CheckReport`` is made once; ``check_report`` shows it as a table or as JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packhorse.contract.batch_contract import ReaderPolicy
from packhorse.declare import BRIDGE_RULES
from packhorse.errors import ConfigError
from packhorse.rules import (
    RULES,
    RUNTIME_RULES,
    RuleInput,
    Unchecked,
    Violation,
    compare,
    errors,
    explain,
    unchecked,
)
from packhorse.rules.model import ExplainableRule
from packhorse_service.check.length_bound import Lengths, fill_bound
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
from packhorse_service.pipeline.plan import open_tokenizer, resolve_contract
from packhorse_service.planning.balance_window import check_window
from packhorse_service.protocol.derived import derived_values
from packhorse_service.server.authentication import load_clients
from packhorse_service.server.bind_policy import require_private

__all__ = [
    "CheckReport",
    "check_access",
    "check_config",
    "check_streams",
    "explain_rule",
]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Findings of one stream's check: broken rules, rules that could not be checked, what follows from the layout."""

    violations: tuple[Violation, ...]
    not_checked: tuple[Unchecked, ...]
    derived: Mapping[str, Any]
    memory: MemoryBound  # of this stream alone
    further: Mapping[str, CheckReport] = field(default_factory=dict)  # of further streams, by name

    @property
    def ok(self) -> bool:
        """No error was found, in any stream; warnings do not count."""
        return not errors(list(self.violations)) and all(report.ok for report in self.further.values())


def check_streams(
    config: ServeConfig,
    base: Path,
    trainer: TrainerFile | None = None,
    world_size: int | None = None,
    lengths: Lengths | None = None,
) -> CheckReport:
    """Check a configuration with all its streams; ``lengths`` are of training samples.

    A trainer's file declares the contract of its training; its facts hold for every stream. Raises as
    ``check_config``, and ``ConfigError`` where the server may hold more than ``memory_limit``.
    """
    facts = None if trainer is None else TrainerFile(trainer=trainer.trainer)

    def report(name: str) -> CheckReport:
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
) -> CheckReport:
    """Check one stream's configuration, and a trainer that would connect; no shard is read.

    Raises ``ConfigError`` where the contract names no sequence length, batch size or vocabulary, or where a
    planning window makes no sense.
    """
    tokenizer = open_tokenizer(config, base)[1]
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
    return CheckReport(tuple(violations), tuple(not_checked), derived, memory)


def explain_rule(name: str) -> str:
    """Return all that is known of a rule of any kind. Raise ``ConfigError`` with the nearest id where there is none."""
    every: tuple[ExplainableRule, ...] = (*RULES, *RUNTIME_RULES, *BRIDGE_RULES)
    known = {rule.id: rule for rule in every}
    if name.upper() in known:
        return explain(known[name.upper()])
    near = difflib.get_close_matches(name.upper(), known, n=1)
    raise ConfigError(f"no rule {name!r}; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"))
