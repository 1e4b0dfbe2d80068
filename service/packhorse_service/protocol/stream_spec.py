"""What one stream is to its readers: the layout and contract that it serves, who reads it, and who may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product

from packhorse import __version__
from packhorse.contract.batch_contract import ReaderPolicy, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import Violation, compare, errors, warnings
from packhorse.rules.runtime_rules import KNOWN_FACTS, PLACE, PROTOCOL, RANKS_AGREE
from packhorse.wire.hello import PROTOCOL_VERSION, ForeignHello
from packhorse.wire.messages import DEFAULT_KEEP_ALIVE_S, Hello, Welcome
from packhorse_service.text.formatting import names

__all__ = ["StreamSpec", "disagreements", "readers_of", "version_violation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """Description of a stream, constant for the life of a server. Times are seconds."""

    stream: str
    layout: ParallelLayout
    contract: ResolvedContract
    fingerprint: bytes
    readers: frozenset[Coordinates]
    steps_ahead: int = 2
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    rejoin_after_s: float = 60.0

    def _compare(self, hello: Hello) -> list[Violation]:
        return compare(hello.contract, hello.layout, hello.window, self.contract, self.layout)

    def warnings(self, hello: Hello) -> tuple[Violation, ...]:
        """Return what this reader should know, and is served nevertheless."""
        return (*warnings(self._compare(hello)), *_not_checked(hello))

    def violations_of(self, hello: Hello) -> list[Violation]:
        """Return every reason to reject this reader."""
        found = errors(self._compare(hello))
        if hello.reader not in self.readers:
            want, remedy = f"a reader of {self.layout}", "check rank and layout"
            found.append(RANKS_AGREE.violation("reader", want=want, got=str(hello.reader), remedy=remedy))
        return [*found, *_impossible_places(hello, self.contract.num_microbatches(self.layout))]

    def welcome(self, attempt: bytes, at: Position, warnings: tuple[Violation, ...]) -> Welcome:
        """Return what tells a reader that stands at ``at`` that the attempt has formed, and that this is its stream."""
        return Welcome(
            stream=self.stream,
            attempt=attempt,
            fingerprint=self.fingerprint,
            position=at,
            contract=self.contract,
            keep_alive_s=self.keep_alive_s,
            warnings=warnings,
        )


def _impossible_places(hello: Hello, num_microbatches: int) -> Iterator[Violation]:
    """Yield why no reader of steps of ``num_microbatches`` stands where this one says, if none does: ``PLACE``."""
    for name, at in {"start": hello.start, "position": hello.position}.items():
        if at.index >= num_microbatches:
            remedy = (
                "serve the layout and batch sizes that the state was saved under, or begin its step again: "
                "load_state_dict(state, repeat_step=True)"
            )
            want = f"an index below the {num_microbatches} micro-batches of a step"
            yield PLACE.violation(name, want=want, got=str(tuple(at)), remedy=remedy)
    held = {ref.step for ref in hello.snapshots}
    step = hello.position.step
    # The snapshot behind a step comes with its last micro-batch; behind the last step of all there is none.
    needed = range(max(step - 1, 0), step + 1) if hello.has_handed_out else (step,)
    if 0 not in needed and not held.intersection(needed):
        want = f"with the snapshot before step {step}"
        got = f"position {tuple(hello.position)}, with snapshots before steps {names(map(str, sorted(held))) or 'none'}"
        yield PLACE.violation("snapshots", want=want, got=got, remedy="load the checkpoint as it was saved")


def _not_checked(hello: Hello) -> Iterator[Violation]:
    """Yield that a trainer declares facts that this server has no rule for."""
    if hello.unknown_facts:
        yield KNOWN_FACTS.violation(
            "trainer",
            want=f"of facts that packhorse {__version__} knows",
            got=names(f"{name} = {value!r:.80}" for name, value in hello.unknown_facts),
            remedy="not checked by this server; a server of the trainer's version would check it",
        )


def version_violation(hello: ForeignHello) -> Violation:
    """Return why a reader of another version is rejected, and what to install: the same version on both sides."""
    problem = f", and its HELLO cannot be decoded here: {hello.problem}" if hello.problem else ""
    upgrade = "" if hello.max_version < PROTOCOL_VERSION else ", or upgrade the server to the trainer's version"
    return PROTOCOL.violation(
        "protocol version",
        want=f"{PROTOCOL_VERSION}, which packhorse {__version__} of the server speaks",
        got=f"{hello.versions}{problem}",
        remedy=f"install packhorse {__version__} with the trainer{upgrade}",
    )


def readers_of(layout: ParallelLayout, readers: ReaderPolicy = ReaderPolicy.ALL) -> frozenset[Coordinates]:
    """Return the coordinates that connect."""
    sizes = (layout.data, layout.context, layout.tensor, layout.pipeline)
    every = (Coordinates(*at) for at in product(*(range(size) for size in sizes)))
    return frozenset(at for at in every if READS[readers](at, layout))


# Whether a coordinate reads for itself, or gets its micro-batches from a peer's broadcast.
READS: dict[ReaderPolicy, Callable[[Coordinates, ParallelLayout], bool]] = {
    ReaderPolicy.ALL: lambda at, layout: True,
    ReaderPolicy.TENSOR_ZERO: lambda at, layout: at.tensor == 0,
    ReaderPolicy.TENSOR_ZERO_EDGES: lambda at, layout: (
        at.tensor == 0 and at.pipeline in (0, *layout.mtp_stages, layout.pipeline - 1)
    ),
}


def disagreements(hellos: Mapping[Coordinates, Hello]) -> list[Violation]:
    """Return the fields in which the readers of a stream declare different things, and who differs: ``RANKS_AGREE``."""
    if len({hello.contract_digest for hello in hellos.values()}) <= 1:
        return []
    declared = {str(at): _declared(hello) for at, hello in sorted(hellos.items())}
    found = []
    for name in dict.fromkeys(name for of_reader in declared.values() for name in of_reader):
        values = {at: of_reader.get(name) for at, of_reader in declared.items()}
        ((usual, count), *_) = Counter(values.values()).most_common(1)
        if count < len(values):
            odd = [f"{at} {value}" for at, value in values.items() if value != usual]
            want, remedy = f"the same for all readers; most declare {usual}", f"declare the same {name} on every rank"
            found.append(RANKS_AGREE.violation(name, want=want, got=names(odd), remedy=remedy))
    return found


def _declared(hello: Hello) -> dict[str, object]:
    """Return every field of a contract and every fact of its trainer, by name."""
    contract, facts = hello.contract, hello.contract.trainer or TrainerFacts()
    return {
        **{f.name: getattr(contract, f.name) for f in fields(contract) if f.name != "trainer"},
        **{f"trainer.{f.name}": getattr(facts, f.name) for f in fields(facts)},
        **{f"trainer.{name}": repr(value) for name, value in hello.unknown_facts},
    }
