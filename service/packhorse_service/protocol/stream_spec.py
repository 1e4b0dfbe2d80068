"""What one stream offers its readers, whom it refuses, and what it warns of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product

from packhorse.contract.batch_contract import BatchContract, ReaderPolicy, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import Violation, compare, errors, warnings
from packhorse.rules.runtime_rules import PROTOCOL, RANKS_AGREE
from packhorse.wire.messages import DEFAULT_KEEP_ALIVE_S, PROTOCOL_VERSION, Hello, Welcome
from packhorse_service.text.formatting import names

__all__ = ["StreamSpec", "disagreements", "readers_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """One stream, constant for the life of a server. Times are seconds."""

    stream: str
    layout: ParallelLayout
    contract: ResolvedContract
    fingerprint: bytes
    readers: frozenset[Coordinates]
    steps_ahead: int = 2
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    rejoin_after_s: float = 60.0

    def _broken(self, hello: Hello) -> list[Violation]:
        return compare(hello.contract, hello.layout, hello.window, self.contract, self.layout)

    def warnings(self, hello: Hello) -> tuple[Violation, ...]:
        """What this reader should know, and is served nevertheless."""
        return tuple(warnings(self._broken(hello)))

    def welcome(self, attempt: bytes, at: Position, warnings: tuple[Violation, ...]) -> Welcome:
        """To a reader that stands at ``at``: the attempt has formed, and this is its stream."""
        return Welcome(
            stream=self.stream,
            attempt=attempt,
            fingerprint=self.fingerprint,
            position=at,
            contract=self.contract,
            keep_alive_s=self.keep_alive_s,
            warnings=warnings,
        )

    def violations_of(self, hello: Hello) -> list[Violation]:
        """Every rule that refuses this reader."""
        found = errors(self._broken(hello))
        if not hello.min_version <= PROTOCOL_VERSION <= hello.max_version:
            got = f"{hello.min_version} … {hello.max_version}"
            want, remedy = str(PROTOCOL_VERSION), "install the server's version"
            found.append(PROTOCOL.violation("protocol", want=want, got=got, remedy=remedy))
        if hello.reader not in self.readers:
            want = f"a reader of {self.layout}"
            got, remedy = str(hello.reader), "check rank and layout"
            found.append(RANKS_AGREE.violation("reader", want=want, got=got, remedy=remedy))
        return found


def readers_of(layout: ParallelLayout, readers: ReaderPolicy = ReaderPolicy.ALL) -> frozenset[Coordinates]:
    """The coordinates that connect."""
    sizes = (layout.data, layout.context, layout.tensor, layout.pipeline)
    every = (Coordinates(*at) for at in product(*(range(size) for size in sizes)))
    return frozenset(at for at in every if READS[readers](at, layout))


# Whether a coordinate reads for itself, or gets its micro-batches from a peer's broadcast.
READS: dict[ReaderPolicy, Callable[[Coordinates, ParallelLayout], bool]] = {
    ReaderPolicy.ALL: lambda at, layout: True,
    ReaderPolicy.TENSOR_ZERO: lambda at, layout: at.tensor == 0,
    ReaderPolicy.TENSOR_ZERO_EDGES: lambda at, layout: at.tensor == 0 and at.pipeline in (0, layout.pipeline - 1),
}


def disagreements(hellos: Mapping[Coordinates, Hello]) -> list[Violation]:
    """``RANKS_AGREE``: the fields in which the readers of a stream declare different things, and who differs."""
    if len({hello.contract_digest for hello in hellos.values()}) <= 1:
        return []
    declared = {str(at): _declared(hello.contract) for at, hello in sorted(hellos.items())}
    found = []
    for name in next(iter(declared.values())):
        values = {at: of_reader[name] for at, of_reader in declared.items()}
        ((usual, count), *_) = Counter(values.values()).most_common(1)
        if count == len(values):
            continue
        odd = [f"{at} {value}" for at, value in values.items() if value != usual]
        got = names(odd)
        want = f"the same for all readers; most declare {usual}"
        remedy = f"declare the same {name} on every rank"
        found.append(RANKS_AGREE.violation(name, want=want, got=got, remedy=remedy))
    return found


def _declared(contract: BatchContract) -> dict[str, object]:
    """Every field of a contract and every fact of its trainer, by name."""
    facts = contract.trainer or TrainerFacts()
    of_trainer = {f"trainer.{f.name}": getattr(facts, f.name) for f in fields(facts)}
    return {f.name: getattr(contract, f.name) for f in fields(contract) if f.name != "trainer"} | of_trainer
