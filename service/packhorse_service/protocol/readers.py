"""Readers of an attempt: where each stands, and the lowest of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import Violation
from packhorse_service.framing import FramedStep, ViewKey, view_key
from packhorse_service.protocol.rendezvous import PendingHello
from packhorse_service.protocol.stream_spec import StreamSpec

__all__ = ["Reader", "ReaderTable"]

log = logging.getLogger("packhorse.attempt")


@dataclass(slots=True)
class Reader:
    """Reader of an attempt. ``peer`` is empty while its connection is down."""

    at: Coordinates
    peer: bytes
    last_peer: bytes  # its connection, the one that went down where ``peer`` is empty
    client: bytes
    window: int
    acked: Position  # handed out to its loop: everything before this; moved by ``ReaderTable.acknowledge``
    sent: Position  # the next to send
    heard_s: float  # when it was last heard
    last_digest: bytes  # of the row before ``acked``, which another server sent; until it was compared
    view: ViewKey  # what it gets of a row
    warnings: tuple[Violation, ...]  # rules that it breaks and is served nevertheless
    loop_idle_s: float = 0.0  # since its loop last asked
    answered: bool = False  # has acknowledged its WELCOME
    said_bye: bool = False  # has said BYE
    starved_since_s: float | None = None  # since when it has nothing in flight and more is to come

    @classmethod
    def from_hello(cls, at: Coordinates, pending: PendingHello, spec: StreamSpec, now: float) -> Reader:
        """Return a reader that stands where its HELLO says."""
        hello = pending.hello
        trainer = hello.contract.trainer or TrainerFacts()
        mtp, tokens = bool(trainer.mtp_num_layers), bool(trainer.tokens_on_every_stage)
        return cls(
            at=at,
            peer=pending.peer,
            last_peer=pending.peer,
            client=hello.client,
            window=hello.window,
            acked=hello.position,
            sent=hello.position,
            heard_s=now,
            last_digest=hello.last_digest,
            view=view_key(at, spec.contract, spec.layout, mtp=mtp, tokens=tokens),
            warnings=spec.warnings(hello),
        )


class ReaderTable:
    """Table of the readers of an attempt, by coordinates and by connection.

    The low watermark (lowest acknowledged position) is kept, not searched: there may be thousands.
    """

    def __init__(self, hellos: Mapping[Coordinates, PendingHello], spec: StreamSpec, now: float = 0.0) -> None:
        self.by_coordinates = {at: Reader.from_hello(at, g, spec, now) for at, g in sorted(hellos.items())}
        self._by_peer = {reader.peer: reader for reader in self}
        self._acked_counts = Counter(reader.acked for reader in self)
        self.low_watermark = min(self._acked_counts, default=Position(0, 0))
        self._unanswered = len(self.by_coordinates)
        self.waiting_for_step: dict[Coordinates, Reader] = {}  # their windows have room for what is not made yet
        for warning in dict.fromkeys(warning for reader in self for warning in reader.warnings):
            log.warning("stream %r: %s", spec.stream, warning)

    def __iter__(self) -> Iterator[Reader]:
        return iter(self.by_coordinates.values())

    def __len__(self) -> int:
        return len(self.by_coordinates)

    def by_peer(self, peer: bytes) -> Reader | None:
        """Return the reader of this connection, the last of its own; it may be down."""
        return self._by_peer.get(peer)

    def mark_answered(self, reader: Reader) -> bool:
        """Note that a reader has answered its WELCOME; return whether all have."""
        self._unanswered -= not reader.answered
        reader.answered = True
        return self._unanswered == 0

    def acknowledge(self, reader: Reader, position: Position) -> bool:
        """Move a reader to a position; return whether the low watermark moved with it."""
        before, counts = reader.acked, self._acked_counts
        if position == before:
            return False
        reader.last_digest = b""  # it has gone on from there
        reader.acked = position
        counts[position] += 1
        counts[before] -= 1
        if counts[before]:
            return False
        del counts[before]
        if before != self.low_watermark:
            return False
        self.low_watermark = min(counts)
        return True

    def take_waiting(self) -> list[Reader]:
        """Return the readers that wait for a step, which now is made, and forget that they do."""
        waiting, self.waiting_for_step = self.waiting_for_step, {}
        return list(waiting.values())

    def move(self, reader: Reader, peer: bytes) -> None:
        """Bind a reader to another connection."""
        del self._by_peer[reader.last_peer]
        self._by_peer[peer] = reader
        reader.peer = reader.last_peer = peer

    def disconnect(self, peer: bytes) -> None:
        """Note that a connection is gone. What it said before, a BYE even, may still wait to be read."""
        reader = self._by_peer.get(peer)
        if reader is not None:
            reader.peer = b""

    def diverged(self, step: FramedStep, num_microbatches: int) -> str | None:
        """Compare rows made again with what readers say they were handed; return what is wrong, if anything is."""
        for reader in self:
            at = reader.acked
            index = at.index - 1 if at.index else num_microbatches - 1
            if not reader.last_digest or step.step != (at.step if at.index else at.step - 1):
                continue
            if step.views_of(reader.view)[index].body.row_digest != reader.last_digest:
                return (
                    f"REPLAY_DIVERGED: step {step.step}, index {index}, made again for {reader.at}, differs from what "
                    "was delivered: the data or its rendering has changed, under the same names and sizes. The row is "
                    f"made of {step.provenance(reader.at.data, index) or 'unknown samples'}. Put back what was "
                    "there, or begin again from a checkpoint"
                )
            reader.last_digest = b""
        return None

    def all_past(self, last: int) -> bool:
        """Return whether every reader has taken the END at step ``last``, or left."""
        return all(reader.said_bye or reader.acked.step > last for reader in self)

    @property
    def all_said_bye(self) -> bool:
        """True where there are readers, and each has said BYE."""
        return len(self) > 0 and all(reader.said_bye for reader in self)
