"""The client half of the protocol: messages and the loop's requests in, effects out.

No socket, clock or thread is here: ``feed`` owns them and calls in. The transitions are a table,
``TRANSITIONS``: a message that has no row for the state is a ``ProtocolError`` and leaves it unchanged.

    IDLE ── connected ──▶ HELLO_SENT ── WELCOME ──▶ STREAMING ── last END handed out ──▶ ENDED
              ▲  HELLO       │                       │
              └──────────────┴── connection lost ────┘          any ── REJECT, fatal ERROR ──▶ FAILED

An END that came with a snapshot ends a pass: the next one follows, and the state stays STREAMING. A reader
that has ENDED still says HELLO and gives its snapshots, until it leaves: the others cannot meet without it.
The server tells it by END once more that they have all ended too, or left.

The client hands out only its position: a lower one is a duplicate and dropped, a higher one makes it say
HELLO again, a frame of another attempt is dropped. What was received and not handed out is dropped when
HELLO is said, so that no micro-batch of one attempt can be taken while the next one forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Any

from msgspec import Struct

from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import BatchContract, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError, HandshakeRefused, PackhorseError, ProtocolError, ServerFailed
from packhorse.protocol.reader_state import FeedState
from packhorse.rules import Violation
from packhorse.wire.digest import digest_of
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import (
    DEFAULT_KEEP_ALIVE_S,
    PROTOCOL_VERSION,
    Ack,
    Batch,
    BatchBody,
    Bye,
    End,
    ErrorCode,
    Frames,
    GetSnapshot,
    Hello,
    Message,
    Reject,
    ServerError,
    Snapshot,
    SnapshotRef,
    Wait,
    Welcome,
)

__all__ = ["ClientSession", "Deliver", "Effect", "Fail", "Finish", "Identity", "Reconnect", "Send", "State"]

UNANSWERED_LIMIT = 5  # keep-alive intervals; a server that knows of a HELLO says WAIT in each


class State(Enum):
    IDLE = auto()  # not connected
    HELLO_SENT = auto()  # no WELCOME yet
    STREAMING = auto()
    ENDED = auto()  # END was handed out, and nothing follows it
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Send:
    """Put this message on the socket, with its further frames."""

    message: Message
    extra: Frames = ()


class Deliver(Struct, frozen=True):
    """Rebuild this micro-batch and keep it ready for the loop."""

    body: BatchBody
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop everything that is ready and was not handed out."""


@dataclass(frozen=True, slots=True)
class Finish:
    """END stands behind what is ready: the loop ends there, or its pass does."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Close the socket, resolve the endpoint again, connect."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise this in the loop."""

    error: PackhorseError


Effect = Send | Deliver | Forget | Finish | Reconnect | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one reader declares; constant for the life of a Feed."""

    stream: str
    reader: Coordinates
    client: bytes
    layout: ParallelLayout
    contract: BatchContract
    window: int
    start_timeout_s: float = 540.0  # for all readers to meet


@dataclass(slots=True)
class ClientSession:
    """State of one reader of one stream. Methods return the effects to carry out, in order."""

    identity: Identity
    start: Position = ORIGIN
    state: State = State.IDLE
    attempt: bytes = NO_ATTEMPT
    fingerprint: bytes = b""
    contract: ResolvedContract | None = None  # the server's, once welcomed
    rebuilder: Rebuilder | None = field(default=None, compare=False)  # by that contract
    _num_microbatches: int = 0  # of a step, once welcomed
    position: Position = ORIGIN  # of the next micro-batch to hand out
    expected: Position = ORIGIN  # of the next one to receive
    last_digest: bytes = b""
    snapshots: dict[int, bytes] = field(default_factory=dict)  # step -> the stream before it
    waiting: Wait | None = None  # what the server said last, until something arrives
    warnings: tuple[Violation, ...] = ()  # the server's, once welcomed
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S  # the server\'s, once welcomed
    released: bool = False  # behind the end: no other reader needs this one any more
    unanswered: int = 0  # keep-alive intervals since HELLO in which nothing was heard

    def __post_init__(self) -> None:
        self.position = self.expected = self.start

    # The loop ----------------------------------------------------------------------------------------

    def handed_out(self, position: Position, digest: bytes) -> None:
        """The loop took the micro-batch at ``position``."""
        if self.contract is None:
            raise ProtocolError("no micro-batch can be handed out before WELCOME")
        if position != self.position:
            raise ProtocolError(f"{tuple(position)} was handed out where {tuple(self.position)} is next")
        self.last_digest, self.position = digest, position.after(self._num_microbatches)

    def end_handed_out(self) -> None:
        """The loop reached the end, of the stream or of a pass; END counts as a step of one."""
        self.position = Position(self.position.step + 1, 0)
        self.last_digest = b""
        if self.position.step not in self.snapshots:  # END brings the next one where another pass follows
            self.state = State.ENDED

    def saved(self, step: int | None = None) -> FeedState:
        """Where the loop stands, or the boundary before an earlier ``step`` that is still held.

        Raises ``ContractError`` where that step was not reached or is held no more.
        """
        # END is no micro-batch: whoever resumes at the end asks for it again.
        taken = Position(self.position.step - 1, 0) if self.state is State.ENDED else self.position
        at = taken if step is None else Position(step, 0)
        snapshot = self.snapshots.get(at.step, b"")
        if not ORIGIN <= at <= taken or (at.step and not snapshot):
            held = ", ".join(str(known) for known in sorted(self.snapshots) if known <= taken.step) or "none"
            raise ContractError(f"no state before step {at.step} is held at {tuple(taken)}; held before steps: {held}")
        # Whether the server was met by now may differ from rank to rank; the state does not.
        return FeedState(self.identity.stream, at, self.fingerprint if at != ORIGIN else b"", snapshot)

    def resume(self, saved: FeedState) -> list[Effect]:
        """Begin at ``saved`` instead of the start, in an attempt that is still to form.

        Raises ``ContractError`` once the loop has taken something, or a state was loaded before.
        """
        self.require_fresh()
        if saved.position == ORIGIN:
            return []
        self.start = self.position = self.expected = saved.position
        self.snapshots = {saved.position.step: saved.snapshot} if saved.snapshot else {}
        self.attempt, self.fingerprint = NO_ATTEMPT, saved.fingerprint
        return self._say_hello() if self.state in (State.HELLO_SENT, State.STREAMING) else []

    def require_fresh(self) -> None:
        """Raise ``ContractError`` where it is too late to load a state."""
        if self.position != ORIGIN:
            raise ContractError(
                f"load_state_dict with stream {self.identity.stream!r} at {tuple(self.position)}: a state is loaded "
                "once, before the first micro-batch; make a new Feed"
            )

    # The connection ----------------------------------------------------------------------------------

    def connected(self) -> list[Effect]:
        """A connection is up: say HELLO."""
        return [] if self.state is State.FAILED else self._say_hello()

    def interval_passed(self) -> list[Effect]:
        """A keep-alive interval on a connection that is up: say HELLO again where the server seems not to know of it.

        At a reconnect a server may read an older HELLO behind the newer one, and then answers to nowhere.
        """
        self.unanswered += self.state is State.HELLO_SENT
        return self._say_hello() if self.unanswered >= UNANSWERED_LIMIT else []

    def _say_hello(self) -> list[Effect]:
        self.unanswered = 0
        if self.state is State.ENDED:
            return [Send(self._hello())]
        self.state = State.HELLO_SENT
        self.expected = self.position
        return [Forget(), Send(self._hello())]

    def _hello(self) -> Hello:
        who = self.identity
        return Hello(
            min_version=PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            stream=who.stream,
            reader=who.reader,
            client=who.client,
            layout=who.layout,
            contract=who.contract,
            contract_digest=who.contract.digest(who.layout),
            attempt=self.attempt,
            start=self.start,
            position=self.position,
            snapshots=tuple(SnapshotRef(step, digest_of(state)) for step, state in sorted(self.snapshots.items())),
            last_digest=self.last_digest,
            window=who.window,
            start_timeout_s=who.start_timeout_s,
        )

    def ack(self, loop_idle_s: float) -> Ack:
        """Everything before ``position`` was handed out."""
        return Ack(stream=self.identity.stream, attempt=self.attempt, position=self.position, loop_idle_s=loop_idle_s)

    def bye(self) -> Bye:
        return Bye(stream=self.identity.stream)

    def receive(self, message: Message, extra: Frames) -> list[Effect]:
        """One message from the server. Raises ``ProtocolError`` where the state has no place for it."""
        transition = TRANSITIONS.get((self.state, type(message)))
        if transition is None:
            raise ProtocolError(f"{type(message).__name__} has no place in state {self.state.name}")
        self.unanswered = 0
        return transition(self, message, extra)

    # Transitions -------------------------------------------------------------------------------------

    def _welcome(self, message: Welcome, _extra: Frames) -> list[Effect]:
        if message.attempt == self.attempt and message.fingerprint != self.fingerprint:
            return self._fail(
                ProtocolError(
                    "the server offers another stream under the same attempt: its data or settings changed; start it "
                    "with those of before, or restart the job from a checkpoint"
                )
            )
        # It may answer an earlier HELLO: what comes twice then is dropped as duplicates.
        if message.position > self.position:
            raise ProtocolError(f"WELCOME at {message.position} where this reader stands at {self.position}")
        if message.attempt != self.attempt and self.position != self.start:
            raise ProtocolError("WELCOME to another attempt, after micro-batches of the last were handed out")
        if self.attempt == NO_ATTEMPT and message.position != self.start:
            return []  # it answers what was said before a state was loaded; the next HELLO forms another attempt
        if self.attempt == NO_ATTEMPT and self.start.index and message.fingerprint != self.fingerprint:
            return self._fail(self._inside_a_step())
        self.state = State.STREAMING
        self.expected = self.position
        self.attempt, self.fingerprint, self.contract = message.attempt, message.fingerprint, message.contract
        self.rebuilder = Rebuilder(message.contract, self.identity.layout, self.identity.reader.context)
        self._num_microbatches = message.contract.num_microbatches(self.identity.layout)
        self.warnings, self.waiting, self.keep_alive_s = message.warnings, None, message.keep_alive_s
        return [Forget(), Send(self.ack(0.0))]

    def _inside_a_step(self) -> ContractError:
        step = self.start.step
        return ContractError(
            f"the state stands inside a step, at {tuple(self.start)}, and the server packs or deals that step "
            "otherwise: serve the layout, batch sizes and settings it was saved under, or resume at a boundary. The "
            f"nearest are {(step, 0)}, for which its snapshot serves too (set its position), and {(step + 1, 0)}"
        )

    def _batch(self, message: Batch, extra: Frames) -> list[Effect]:
        position = message.position
        if message.attempt != self.attempt or position < self.expected:
            return []
        if position > self.expected:
            return self._say_hello()
        self.waiting = None
        self.expected = position.after(self._num_microbatches)
        if len(extra) == 2:
            self.snapshots[position.step + 1] = bytes(extra[1])
        self._release_snapshots(message.low_watermark)
        return [Deliver(message.body, extra[0])]

    def _release_snapshots(self, low_watermark: Position) -> None:
        """Keep the last snapshot at or below the low watermark, and below the step in training; and all after it."""
        needed = min(low_watermark.step, self.position.step - 1)
        while len(self.snapshots) > 1:  # they came in the order of their steps
            oldest, next_one = islice(self.snapshots, 2)
            if next_one > needed:
                break
            del self.snapshots[oldest]

    def _end(self, message: End, extra: Frames) -> list[Effect]:
        if message.attempt != self.attempt or message.position < self.expected:
            return []
        if message.position > self.expected:
            return self._say_hello()
        self.waiting = None
        self.expected = Position(message.position.step + 1, 0)
        if extra:
            self.snapshots[self.expected.step] = bytes(extra[0])
        return [Finish()]

    def _get_snapshot(self, message: GetSnapshot, _extra: Frames) -> list[Effect]:
        state = self.snapshots.get(message.step)
        if state is None or digest_of(state) != message.digest:
            raise ProtocolError(f"the server asked for a snapshot before step {message.step} that is not held here")
        return [Send(Snapshot(stream=self.identity.stream, step=message.step), (state,))]

    def _wait(self, message: Wait, _extra: Frames) -> list[Effect]:
        self.waiting = message
        return []

    def _reject(self, message: Reject, _extra: Frames) -> list[Effect]:
        return self._fail(HandshakeRefused(message.violations))

    def _error(self, message: ServerError, _extra: Frames) -> list[Effect]:
        if message.fatal:
            # The server waits for this BYE before it goes: a connection that it closed at once could lose the error.
            return [Send(self.bye()), *self._fail(ServerFailed(message.message))]
        return [Reconnect()] if message.code is ErrorCode.REJOIN else self._say_hello()

    def _welcome_back(self, message: Welcome, _extra: Frames) -> list[Effect]:
        """The others go on; this reader has taken all."""
        return [Send(self.ack(0.0))] if message.attempt == self.attempt else []

    def _error_at_end(self, message: ServerError, _extra: Frames) -> list[Effect]:
        """Nothing is owed to this reader any more; what can be mended is."""
        if message.fatal:
            return self._release(message, ())
        return [Reconnect()] if message.code is ErrorCode.REJOIN else self._say_hello()

    def _fail(self, error: PackhorseError) -> list[Effect]:
        self.state = State.FAILED
        return [Fail(error)]

    def _release(self, _message: Message, _extra: Frames) -> list[Effect]:
        self.released = True
        return []

    def _ignore(self, _message: Message, _extra: Frames) -> list[Effect]:
        return []


Transition = Callable[[ClientSession, Any, Frames], list[Effect]]

FROM_SERVER = (Welcome, Reject, GetSnapshot, Batch, Wait, End, ServerError)

TRANSITIONS: dict[tuple[State, type], Transition] = {
    (State.HELLO_SENT, Welcome): ClientSession._welcome,
    (State.HELLO_SENT, Reject): ClientSession._reject,
    (State.HELLO_SENT, GetSnapshot): ClientSession._get_snapshot,
    (State.HELLO_SENT, Wait): ClientSession._wait,
    (State.HELLO_SENT, ServerError): ClientSession._error,
    # Sent before this HELLO reached the server.
    (State.HELLO_SENT, Batch): ClientSession._ignore,
    (State.HELLO_SENT, End): ClientSession._ignore,
    (State.STREAMING, Batch): ClientSession._batch,
    (State.STREAMING, End): ClientSession._end,
    (State.STREAMING, Wait): ClientSession._wait,
    (State.STREAMING, ServerError): ClientSession._error,
    # A new attempt may form over a connection that is up: the server says so to a reader that said HELLO again.
    (State.STREAMING, Welcome): ClientSession._welcome,
    (State.STREAMING, Reject): ClientSession._reject,
    (State.STREAMING, GetSnapshot): ClientSession._get_snapshot,
    **{(State.ENDED, kind): ClientSession._ignore for kind in FROM_SERVER},
    (State.ENDED, Welcome): ClientSession._welcome_back,
    (State.ENDED, GetSnapshot): ClientSession._get_snapshot,
    (State.ENDED, ServerError): ClientSession._error_at_end,
    (State.ENDED, End): ClientSession._release,
    (State.ENDED, Reject): ClientSession._release,
    **{(State.FAILED, kind): ClientSession._ignore for kind in FROM_SERVER},
}
