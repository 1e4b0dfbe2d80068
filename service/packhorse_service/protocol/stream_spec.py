"""What one stream offers its readers, whom it refuses, and what it warns of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product

from packhorse.contract.batch_contract import BatchContract, ReaderPolicy, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import Violation, compare, errors, warnings
from packhorse.wire.messages import DEFAULT_KEEP_ALIVE_S, PROTOCOL_VERSION, Hello, Welcome
from packhorse_service.protocol.rejection import refusal
from packhorse_service.protocol.rendezvous import Quorum, Rendezvous

__all__ = ["StreamSpec", "disagreements", "dismissals", "readers_of"]


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

    def refusals(self, hello: Hello) -> list[Violation]:
        """Every rule that refuses this reader."""
        found = errors(self._broken(hello))
        if not hello.min_version <= PROTOCOL_VERSION <= hello.max_version:
            got = f"{hello.min_version} … {hello.max_version}"
            found.append(refusal("PROTOCOL", "protocol", str(PROTOCOL_VERSION), got, "install the server's version"))
        if hello.reader not in self.readers:
            want = f"a reader of {self.layout}"
            found.append(refusal("RANKS_AGREE", "reader", want, str(hello.reader), "check rank and layout"))
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
        got = ", ".join(odd[:NAMED]) + (f" and {len(odd) - NAMED} more" if len(odd) > NAMED else "")
        want = f"the same for all readers; most declare {usual}"
        found.append(refusal("RANKS_AGREE", name, want, got, f"declare the same {name} on every rank"))
    return found


def _declared(contract: BatchContract) -> dict[str, object]:
    """Every field of a contract and every fact of its trainer, by name."""
    facts = contract.trainer or TrainerFacts()
    of_trainer = {f"trainer.{f.name}": getattr(facts, f.name) for f in fields(facts)}
    return {f.name: getattr(contract, f.name) for f in fields(contract) if f.name != "trainer"} | of_trainer


def dismissals(rendezvous: Rendezvous, quorum: Quorum | None) -> Iterator[tuple[bytes, tuple[Violation, ...]]]:
    """All are here, and declare different contracts: whom to refuse, each by its connection."""
    hellos = quorum.hellos if quorum else {}
    violations = tuple(disagreements({at: pending.hello for at, pending in hellos.items()}))
    if violations:
        for pending in hellos.values():
            rendezvous.forget(pending.peer)
            yield pending.peer, violations


NAMED = 4  # readers that differ, in a message
