"""HELLO: how a reader introduces itself, and the one message whose beginning every version reads.

Its first fields, those of ``ForeignHello``, are the same in every version of the protocol. The versions that a reader
speaks are compared before the rest is decoded: a HELLO that has no version in common with this side, or that has one
and yet is none that this side can decode, raises ``OtherVersion`` with these fields. The server answers with REJECT,
which is the same in every version too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_type_hints

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ProtocolError
from packhorse.schema import decoder_for, map_decoder
from packhorse.wire.facts import DeclaredFacts, UnknownFact, declared_facts, read_facts
from packhorse.wire.limits import (
    ATTEMPT_BYTES,
    DIGEST_BYTES,
    NAME_LIMIT,
    NO_ATTEMPT,
    WINDOW_LIMIT,
    require,
    require_position,
)

__all__ = ["PROTOCOL_VERSION", "ForeignHello", "Hello", "OtherVersion", "SnapshotRef", "hello_fields", "read_hello"]

PROTOCOL_VERSION = 2


class SnapshotRef(NamedTuple):
    """Reference to a snapshot that somebody holds: the stream as it was before ``step``."""

    step: int
    digest: bytes

    def check(self) -> None:
        """Raise ``ProtocolError`` where no snapshot can be named like this."""
        require(self.step >= 0 and len(self.digest) == DIGEST_BYTES, "a snapshot is named by a step and 16 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Client → server: who I am, where I stand, what I hold."""

    min_version: int  # lowest version of the protocol that this client speaks; its HELLO has the form of that
    max_version: int  # highest
    stream: str  # at most 64 characters
    reader: Coordinates
    client: bytes  # 16 random ones, the same for the life of this process's feed
    layout: ParallelLayout
    contract: BatchContract  # what it relies on
    contract_digest: bytes  # 16: equal where contract and layout are; compared among readers
    attempt: bytes  # 8; none in a new process, or after a state was loaded
    start: Position  # where this process began
    position: Position  # of the next micro-batch that it hands out
    snapshots: tuple[SnapshotRef, ...]  # that it holds; the digest is BLAKE2b with 16 bytes
    last_digest: bytes  # row digest of the micro-batch before ``position``; none where none was handed out
    window: int  # micro-batches that may be under way to it; at least 2
    start_timeout_s: float  # how long it waits for the others before it gives up
    unknown_facts: tuple[UnknownFact, ...] = ()  # of its trainer; on the wire they stand among the others

    def __post_init__(self) -> None:
        require(self.start_timeout_s >= 0, "start_timeout_s is never negative")
        require(len(self.client) == DIGEST_BYTES, "a client id has 16 bytes")
        require(self.attempt == NO_ATTEMPT or len(self.attempt) == ATTEMPT_BYTES, "an attempt has 8 bytes or none")
        require(len(self.last_digest) in (0, DIGEST_BYTES), "a digest has 16 bytes")
        require(len(self.contract_digest) == DIGEST_BYTES, "a digest has 16 bytes")
        for ref in self.snapshots:
            ref.check()
        require(len(self.stream) <= NAME_LIMIT, f"a stream's name has at most {NAME_LIMIT} characters")
        require(0 <= self.window <= WINDOW_LIMIT, f"window must be in 0 … {WINDOW_LIMIT}")
        require_position(self.start)
        require_position(self.position)
        require(self.position >= self.start, "position is never before start")

    @property
    def has_handed_out(self) -> bool:
        """True once its loop has taken something since this process began."""
        return self.position != self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignHello:
    """HELLO of a version that is not spoken here: the fields that it has in every version."""

    min_version: int
    max_version: int
    stream: str
    reader: Coordinates
    problem: str = ""  # why it cannot be decoded, where there is a version in common

    def __post_init__(self) -> None:
        require(len(self.stream) <= NAME_LIMIT, f"a stream's name has at most {NAME_LIMIT} characters")

    @property
    def versions(self) -> str:
        """Versions that the reader speaks, for people."""
        return str(self.min_version) + (f" … {self.max_version}" if self.max_version != self.min_version else "")


class OtherVersion(ProtocolError):
    """Raised for a HELLO of another version of the protocol; ``hello`` is what can be read of it."""

    def __init__(self, hello: ForeignHello) -> None:
        self.hello = hello
        problem = f" ({hello.problem})" if hello.problem else ""
        super().__init__(f"HELLO of protocol version {hello.versions}, here is {PROTOCOL_VERSION}{problem}")


def hello_fields(hello: Hello) -> dict[str, object]:
    """Return the fields of a HELLO as they go on the wire."""
    contract = {f.name: getattr(hello.contract, f.name) for f in fields(hello.contract)}
    contract["trainer"] = declared_facts(hello.contract.trainer, hello.unknown_facts)
    return {name: getattr(hello, name) for name in ON_THE_WIRE} | {"contract": contract}


def read_hello(value: object, where: str) -> Hello:
    """Read the fields of a HELLO, its versions first.

    Raise ``OtherVersion`` where they have none in common with this side, or where they reach beyond this version and
    the rest cannot be decoded; ``ProtocolError`` where this is no HELLO of any version, or a broken one of this.
    """
    foreign = _beginning(value, where)
    if not foreign.min_version <= PROTOCOL_VERSION <= foreign.max_version:
        raise OtherVersion(foreign)
    try:
        hello: Hello = read_exactly(value, where)
    except ProtocolError as error:
        if foreign.min_version == foreign.max_version:
            raise
        raise OtherVersion(replace(foreign, problem=str(error))) from error
    return hello


def _beginning(value: object, where: str) -> ForeignHello:
    if not isinstance(value, dict) or not value.keys() >= BEGINNING.keys():
        raise ProtocolError(f"{where} must be a map that has {', '.join(BEGINNING)}, in every version")
    return ForeignHello(**{name: read(value[name], f"{where}.{name}") for name, read in BEGINNING.items()})


def _contract(trainer: DeclaredFacts, **declared: Any) -> tuple[BatchContract, tuple[UnknownFact, ...]]:
    facts = None if trainer.known is None else TrainerFacts(**trainer.known)
    return BatchContract(trainer=facts, **declared), trainer.unknown


def _hello(contract: tuple[BatchContract, tuple[UnknownFact, ...]], **given: Any) -> Hello:
    return Hello(contract=contract[0], unknown_facts=contract[1], **given)


BEGINNING = {
    name: decoder_for(get_type_hints(ForeignHello)[name]) for name in ("min_version", "max_version", "stream", "reader")
}
ON_THE_WIRE = tuple(f.name for f in fields(Hello) if f.name != "unknown_facts")
CONTRACT = {name: decoder_for(hint) for name, hint in get_type_hints(BatchContract).items() if name != "trainer"}
read_exactly = map_decoder(
    {name: decoder_for(get_type_hints(Hello)[name]) for name in ON_THE_WIRE if name != "contract"}
    | {"contract": map_decoder(CONTRACT | {"trainer": read_facts}, _contract)},
    _hello,
)
