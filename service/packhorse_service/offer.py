"""What one stream offers its readers, and whom it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.contract import ResolvedContract
from packhorse.layout import Coordinates, ParallelLayout
from packhorse.rules import Severity, Violation, compare
from packhorse.wire import PROTOCOL_VERSION, Hello

__all__ = ["Offer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One stream, constant for the life of a server. Times are seconds."""

    server: bytes
    stream: str
    layout: ParallelLayout
    contract: ResolvedContract
    fingerprint: bytes
    readers: frozenset[Coordinates]
    steps_ahead: int = 2
    keep_alive_s: float = 1.0
    rejoin_after_s: float = 60.0

    def refusals(self, hello: Hello) -> list[Violation]:
        """Every rule that this reader breaks."""
        found = compare(hello.contract, hello.layout, hello.window, self.contract, self.layout)
        if not hello.min_version <= PROTOCOL_VERSION <= hello.max_version:
            got = f"{hello.min_version} … {hello.max_version}"
            found.append(_refusal("PROTOCOL", "protocol", str(PROTOCOL_VERSION), got, "install the server's version"))
        if hello.reader not in self.readers:
            want = f"a reader of {self.layout}"
            found.append(_refusal("RANKS_AGREE", "reader", want, str(hello.reader), "check rank and layout"))
        return found


def _refusal(rule: str, field_name: str, want: str, got: str, remedy: str) -> Violation:
    return Violation(rule=rule, severity=Severity.ERROR, field=field_name, want=want, got=got, remedy=remedy)
