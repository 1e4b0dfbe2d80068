"""One attempt: its phase, its readers, where each stands, and the lowest of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.rules import Violation
from packhorse_service.framing import FramedStep, ViewKey, view_of
from packhorse_service.protocol.rendezvous import Greeting
from packhorse_service.protocol.stream_spec import StreamSpec

__all__ = ["Phase", "Reader", "Roster"]

log = logging.getLogger("packhorse.attempt")


class Phase(Enum):
    FORMING = auto()  # no attempt yet
    RESTORING = auto()  # all readers are here; the stream is brought to where they stand
    WELCOMING = auto()  # WELCOME is sent, not yet acknowledged by all
    RUNNING = auto()
    ENDED = auto()  # every reader has taken END


@dataclass(slots=True)
class Reader:
    """One reader of the attempt. ``peer`` is empty while its connection is down."""

    at: Coordinates
    peer: bytes
    known_by: bytes  # its connection, the one that went down where ``peer`` is empty
    client: bytes
    window: int
    acked: Position  # handed out to its loop: everything before this; moved by ``Roster.acknowledge``
    sent: Position  # the next to send
    heard_s: float  # when it was last heard
    last_digest: bytes  # of the row before ``acked``, which another server sent; until it was compared
    view: ViewKey  # what it gets of a row
    warnings: tuple[Violation, ...]  # rules that it breaks and is served nevertheless
    loop_idle_s: float = 0.0  # since its loop last asked
    answered: bool = False  # has acknowledged its WELCOME
    left: bool = False  # has said BYE
    owed_since_s: float | None = None  # since when it has nothing in flight and more is to come

    @classmethod
    def greeted(cls, at: Coordinates, greeting: Greeting, spec: StreamSpec, now: float) -> Reader:
        hello = greeting.hello
        trainer = hello.contract.trainer
        mtp = trainer is not None and bool(trainer.mtp_num_layers) and at.pipeline == spec.layout.pipeline - 1
        return cls(
            at=at,
            peer=greeting.peer,
            known_by=greeting.peer,
            client=hello.client,
            window=hello.window,
            acked=hello.position,
            sent=hello.position,
            heard_s=now,
            last_digest=hello.last_digest,
            view=view_of(at, spec.contract, spec.layout, mtp=mtp),
            warnings=spec.warnings(hello),
        )


class Roster:
    """Readers by coordinates and by connection. The floor is kept, not searched: there may be thousands."""

    def __init__(self, greetings: Mapping[Coordinates, Greeting], spec: StreamSpec, now: float = 0.0) -> None:
        self.by_coordinates = {at: Reader.greeted(at, g, spec, now) for at, g in sorted(greetings.items())}
        self._by_peer = {reader.peer: reader for reader in self}
        self._standing = Counter(reader.acked for reader in self)
        self.floor = min(self._standing, default=Position(0, 0))
        self._silent = len(self.by_coordinates)
        self.hungry: dict[Coordinates, Reader] = {}  # their windows have room for what is not made yet
        for warning in dict.fromkeys(warning for reader in self for warning in reader.warnings):
            log.warning("stream %r: %s", spec.stream, warning)

    def __iter__(self) -> Iterator[Reader]:
        return iter(self.by_coordinates.values())

    def __len__(self) -> int:
        return len(self.by_coordinates)

    def of(self, peer: bytes) -> Reader | None:
        return self._by_peer.get(peer)

    def answer(self, reader: Reader) -> bool:
        """A WELCOME was acknowledged; whether all have been."""
        self._silent -= not reader.answered
        reader.answered = True
        return self._silent == 0

    def acknowledge(self, reader: Reader, position: Position) -> bool:
        """A reader moved; whether the floor did."""
        before, standing = reader.acked, self._standing
        if position == before:
            return False
        reader.last_digest = b""  # it has gone on from there
        reader.acked = position
        standing[position] += 1
        standing[before] -= 1
        if standing[before]:
            return False
        del standing[before]
        if before != self.floor:
            return False
        self.floor = min(standing)
        return True

    def take_hungry(self) -> list[Reader]:
        """Those that wait for a step to be made, which now is."""
        waiting, self.hungry = self.hungry, {}
        return list(waiting.values())

    def move(self, reader: Reader, peer: bytes) -> None:
        """A reader is on another connection."""
        del self._by_peer[reader.known_by]
        self._by_peer[peer] = reader
        reader.peer = reader.known_by = peer

    def lose(self, peer: bytes) -> None:
        """A connection is gone. What it said before, a BYE even, may still wait to be read."""
        reader = self._by_peer.get(peer)
        if reader is not None:
            reader.peer = b""

    def diverged(self, step: FramedStep, num_microbatches: int) -> str | None:
        """Compare rows made again with what readers say they were handed; what is wrong, if anything is."""
        for reader in self:
            at = reader.acked
            index = at.index - 1 if at.index else num_microbatches - 1
            if not reader.last_digest or step.step != (at.step if at.index else at.step - 1):
                continue
            if step.of(reader.view)[index].body.row_digest != reader.last_digest:
                return (
                    f"REPLAY_DIVERGED: step {step.step}, index {index}, made again for {reader.at}, differs from what "
                    "was delivered: the data or its rendering has changed, under the same names and sizes. The row is "
                    f"made of {step.provenance(reader.at.data, index) or 'unknown samples'}. Put back what was "
                    "there, or begin again from a checkpoint"
                )
            reader.last_digest = b""
        return None

    def all_behind(self, last: int) -> bool:
        """Whether every reader has taken the END at step ``last``, or left."""
        return all(reader.left or reader.acked.step > last for reader in self)

    @property
    def all_left(self) -> bool:
        return len(self) > 0 and all(reader.left for reader in self)
