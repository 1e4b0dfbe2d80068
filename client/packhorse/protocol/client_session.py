"""The client half of the protocol: messages and the loop's requests in, effects out.

No socket, clock or thread is here: ``feed`` owns them and calls in. The transitions are a table, ``TRANSITIONS``:
what has no row for the state is a ``ProtocolError``, and leads nowhere. What leads from one state to another:

    IDLE       ── connected ────────────────────────────▶ HELLO_SENT
    HELLO_SENT ── WELCOME ──────────────────────────────▶ STREAMING, FAILED
               ── REJECT, ERROR ────────────────────────▶ FAILED
    STREAMING  ── connected, state loaded, BATCH, END ──▶ HELLO_SENT
               ── end handed out ───────────────────────▶ ENDED
               ── ERROR ────────────────────────────────▶ HELLO_SENT, FAILED
               ── WELCOME, REJECT ──────────────────────▶ FAILED
    FAILED     ── end handed out ───────────────────────▶ ENDED

An END that came with a snapshot ends a pass: the next one follows, and the state stays STREAMING. A reader
that has ENDED still says HELLO and gives its snapshots, until it leaves: the others cannot meet without it.
The server tells it by END once more that they have all ended too, or left.

The client hands out only its position: a lower one is a duplicate and dropped, a higher one makes it say
HELLO again, a frame of another attempt is dropped. What was received and not handed out is dropped when
HELLO is said, so that no micro-batch of one attempt can be taken while the next one forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError, HandshakeRefused, PackhorseError, ProtocolError, ServerFailed
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.effects import Deliver, Effect, Fail, Finish, Forget, Reconnect, Send
from packhorse.protocol.reader_progress import ReaderProgress
from packhorse.protocol.transition_table import Table, Transition, rows_by_state
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import (
    Ack,
    Batch,
    Bye,
    End,
    ErrorCode,
    Frames,
    GetSnapshot,
    Message,
    Reject,
    ServerError,
    Snapshot,
    Wait,
    Welcome,
)

__all__ = ["TRANSITIONS", "ClientSession", "State"]

UNANSWERED_LIMIT = 5  # keep-alive intervals; a server that knows of a HELLO says WAIT in each


class State(Enum):
    """State of a reader's conversation with its server."""

    IDLE = auto()  # not connected yet
    HELLO_SENT = auto()  # no WELCOME yet
    STREAMING = auto()
    ENDED = auto()  # END was handed out, and nothing follows it
    FAILED = auto()


class Connected:
    """Event: a connection is up. One that is lost changes nothing until the next one is."""


class Unanswered:
    """Event: a HELLO was not answered in ``UNANSWERED_LIMIT`` keep-alive intervals."""


class StateLoaded:
    """Event: the loop begins at a checkpoint's state instead of the start."""


class HandedOut:
    """Event: the loop took the next micro-batch."""


class EndHandedOut:
    """Event: the loop reached an END."""


@dataclass(slots=True)
class ClientSession:
    """Conversation of one reader of one stream. Methods return the effects to carry out, in order."""

    progress: ReaderProgress
    state: State = State.IDLE
    unanswered: int = 0  # keep-alive intervals since HELLO in which nothing was heard
    _rows: Mapping[type, Transition[State]] = field(init=False, repr=False, compare=False)  # of the state

    def __post_init__(self) -> None:
        self._rows = ROWS[self.state]

    @property
    def position(self) -> Position:
        """Position of the next micro-batch to hand out."""
        return self.progress.position

    @property
    def attempt(self) -> bytes:
        """Name of the attempt that this reader is part of; empty until one has formed."""
        return self.progress.attempt

    @property
    def waiting(self) -> Wait | None:
        """The WAIT that the server sent last; ``None`` once something arrived."""
        return self.progress.waiting

    # The loop ----------------------------------------------------------------------------------------

    def handed_out(self, position: Position, digest: bytes) -> None:
        """Note that the loop took the micro-batch at ``position``, whose row has this digest.

        Raises ``ProtocolError`` where another one is next, or none can be.
        """
        self._follow(HandedOut, position, digest)

    def end_handed_out(self) -> None:
        """Note that the loop reached the end, of the stream or of a pass; END counts as a step of one."""
        self._follow(EndHandedOut)

    def saved(self, step: int | None = None, owed: Position | None = None) -> FeedState:
        """Return where the loop stands, or the boundary before an earlier ``step`` that is still held.

        ``owed``: the first that counts as handed out here, and that the loop was not given.

        Raises ``ContractError`` where that step was not reached or is held no more.
        """
        return self.progress.saved(step, owed, ended=self.state is State.ENDED)

    def resume(self, saved: FeedState) -> list[Effect]:
        """Begin at ``saved`` instead of the start, in an attempt that is still to form.

        Raises ``ContractError`` once the loop has taken something, or a state was loaded before.
        """
        self.progress.require_fresh()
        return self._follow(StateLoaded, saved) if saved.position != ORIGIN else []

    # The connection ----------------------------------------------------------------------------------

    def connected(self) -> list[Effect]:
        """Note that a connection is up, and say HELLO."""
        return self._follow(Connected)

    def interval_passed(self) -> list[Effect]:
        """Note a keep-alive interval on a connection that is up: say HELLO again where the server seems not to know it.

        At a reconnect a server may read an older HELLO behind the newer one, and then answers to nowhere.
        """
        self.unanswered += self.state is State.HELLO_SENT
        return self._follow(Unanswered) if self.unanswered >= UNANSWERED_LIMIT else []

    def receive(self, message: Message, extra: Frames) -> list[Effect]:
        """Act on one message from the server. Raises ``ProtocolError`` where the state has no place for it."""
        return self._follow(type(message), message, extra)

    def ack(self, loop_idle_s: float) -> Ack:
        """Return the ACK of all that was handed out; the loop asked last ``loop_idle_s`` seconds ago."""
        return self.progress.ack(loop_idle_s)

    def bye(self) -> Bye:
        """Return the BYE of an orderly leave."""
        return Bye(stream=self.progress.identity.stream)

    # The table ---------------------------------------------------------------------------------------

    def _follow(self, event: type, *arguments: object) -> list[Effect]:
        """Do what the row of an event in this state says. Raises ``ProtocolError`` where there is none."""
        row = self._rows.get(event)
        if row is None:
            raise ProtocolError(f"{event.__name__} has no place in state {self.state.name}")
        state, effects = row.handler(self.progress, *arguments)
        self.unanswered = 0
        if state is not STAYS:
            self._enter(state, row)
        return effects  # type: ignore[no-any-return]

    def _enter(self, state: State, row: Transition[State]) -> None:
        """Enter a state. Raises ``ProtocolError`` where the row does not lead there."""
        if state not in row.to:
            raise ProtocolError(f"{self.state.name} must not become {state.name} here")
        self.state, self._rows = state, ROWS[state]


# Handlers: what the reader does, and the state it leads to ------------------------------------------------

STAYS = None
Outcome = tuple[State | None, list[Effect]]


def _ignore(_reader: ReaderProgress, *_: object) -> Outcome:
    """Ignore it, with no answer."""
    return STAYS, []


def _say_hello(reader: ReaderProgress, *_: object) -> Outcome:
    """Drop what is ready, say HELLO."""
    reader.expected = reader.position
    return State.HELLO_SENT, [Forget(), Send(reader.hello())]


def _say_hello_at_end(reader: ReaderProgress) -> Outcome:
    """Say HELLO, so that the others can go on."""
    return STAYS, [Send(reader.hello())]


def _load_state(reader: ReaderProgress, saved: FeedState) -> Outcome:
    """Begin at that state, and its snapshot."""
    reader.load(saved)
    return STAYS, []


def _load_state_and_say_hello(reader: ReaderProgress, saved: FeedState) -> Outcome:
    """Begin at that state, say HELLO."""
    reader.load(saved)
    return _say_hello(reader)


def _welcome(reader: ReaderProgress, message: Welcome, _extra: Frames) -> Outcome:
    """Drop what is ready, expect the next to hand out, ACK."""
    if message.attempt == reader.attempt and message.fingerprint != reader.fingerprint:
        return _fail(
            ProtocolError(
                "the server offers another stream under the same attempt: its data or settings changed; start it "
                "with those of before, or restart the job from a checkpoint"
            )
        )
    # It may answer an earlier HELLO: what comes twice then is dropped as duplicates.
    if message.position > reader.position:
        raise ProtocolError(f"WELCOME at {message.position} where this reader stands at {reader.position}")
    if message.attempt != reader.attempt and reader.position != reader.start:
        raise ProtocolError("WELCOME to another attempt, after micro-batches of the last were handed out")
    if reader.attempt == NO_ATTEMPT and message.position != reader.start:
        return STAYS, []  # it answers what was said before a state was loaded; the next HELLO forms another attempt
    if reader.attempt == NO_ATTEMPT and reader.start.index and message.fingerprint != reader.fingerprint:
        return _fail(_inside_a_step(reader.start))
    reader.agree(message)
    return State.STREAMING, [Forget(), Send(reader.ack(0.0))]


def _inside_a_step(start: Position) -> ContractError:
    step = start.step
    return ContractError(
        f"the state stands inside a step, at {tuple(start)}, and the server packs or deals that step "
        "otherwise: serve the layout, batch sizes and settings it was saved under, or resume at a boundary. The "
        f"nearest are {(step, 0)}, which load_state_dict(state, repeat_step=True) begins at, and {(step + 1, 0)}"
    )


def _batch(reader: ReaderProgress, message: Batch, extra: Frames) -> Outcome:
    """Deliver it, by its position."""
    position = message.position
    if message.attempt != reader.attempt or position < reader.expected:
        return STAYS, []
    if position > reader.expected or reader.agreed is None:
        return _say_hello(reader)
    reader.waiting = None
    reader.expected = position.after(reader.agreed.num_microbatches)
    if len(extra) == 2:
        reader.snapshots.add(position.step + 1, extra[1])
    # The last at or below the low watermark, and below the step in training, may still be asked for.
    reader.snapshots.release(min(message.low_watermark.step, reader.position.step - 1))
    return STAYS, [Deliver(message.body, extra[0])]


def _end(reader: ReaderProgress, message: End, extra: Frames) -> Outcome:
    """Deliver it, by its position."""
    if message.attempt != reader.attempt or message.position < reader.expected:
        return STAYS, []
    if message.position > reader.expected:
        return _say_hello(reader)
    reader.waiting = None
    reader.expected = Position(message.position.step + 1, 0)
    if extra:
        reader.snapshots.add(reader.expected.step, extra[0])
    return STAYS, [Finish()]


def _hand_out(reader: ReaderProgress, position: Position, digest: bytes) -> Outcome:
    """Go on by one position."""
    reader.hand_out(position, digest)
    return STAYS, []


def _hand_out_end(reader: ReaderProgress) -> Outcome:
    """Go on by one step; without a snapshot behind it, that was all."""
    return STAYS if reader.hand_out_end() else State.ENDED, []


def _get_snapshot(reader: ReaderProgress, message: GetSnapshot, _extra: Frames) -> Outcome:
    """Send the snapshot that is named."""
    snapshot = reader.snapshots.named(message.step, message.digest)
    return STAYS, [Send(Snapshot(stream=reader.identity.stream, step=message.step), (snapshot,))]


def _wait(reader: ReaderProgress, message: Wait, _extra: Frames) -> Outcome:
    """Remember it, to tell people."""
    reader.waiting = message
    return STAYS, []


def _reject(_reader: ReaderProgress, message: Reject, _extra: Frames) -> Outcome:
    """Raise it in the loop."""
    return _fail(HandshakeRefused(message.violations))


def _error(reader: ReaderProgress, message: ServerError, _extra: Frames) -> Outcome:
    """Say HELLO or reconnect, as it says; a fatal one is raised in the loop."""
    if message.fatal:
        # The server waits for this BYE before it goes: a connection that it closed at once could lose the error.
        state, effects = _fail(ServerFailed(message.message))
        return state, [Send(Bye(stream=reader.identity.stream)), *effects]
    return (STAYS, [Reconnect()]) if message.code is ErrorCode.REJOIN else _say_hello(reader)


def _welcome_at_end(reader: ReaderProgress, message: Welcome, _extra: Frames) -> Outcome:
    """Send an ACK: the others go on, this reader has taken all."""
    return STAYS, [Send(reader.ack(0.0))] if message.attempt == reader.attempt else []


def _error_at_end(reader: ReaderProgress, message: ServerError, _extra: Frames) -> Outcome:
    """Say HELLO or reconnect, as it says; a fatal one releases this reader."""
    if message.fatal:
        return _release(reader)
    return (STAYS, [Reconnect()]) if message.code is ErrorCode.REJOIN else _say_hello_at_end(reader)


def _release(reader: ReaderProgress, *_: object) -> Outcome:
    """Leave when closed: no other reader needs this one any more."""
    reader.released = True
    return STAYS, []


def _fail(error: PackhorseError) -> Outcome:
    return State.FAILED, [Fail(error)]


# The transitions -----------------------------------------------------------------------------------------

TRANSITIONS: Table[State] = {
    (State.IDLE, Connected): Transition(_say_hello, (State.HELLO_SENT,)),
    (State.IDLE, StateLoaded): Transition(_load_state, (State.IDLE,)),
    (State.HELLO_SENT, Connected): Transition(_say_hello, (State.HELLO_SENT,)),
    (State.HELLO_SENT, Unanswered): Transition(_say_hello, (State.HELLO_SENT,)),
    (State.HELLO_SENT, StateLoaded): Transition(_load_state_and_say_hello, (State.HELLO_SENT,)),
    (State.HELLO_SENT, Welcome): Transition(_welcome, (State.HELLO_SENT, State.STREAMING, State.FAILED)),
    (State.HELLO_SENT, Reject): Transition(_reject, (State.FAILED,)),
    (State.HELLO_SENT, GetSnapshot): Transition(_get_snapshot, (State.HELLO_SENT,)),
    (State.HELLO_SENT, Wait): Transition(_wait, (State.HELLO_SENT,)),
    (State.HELLO_SENT, ServerError): Transition(_error, (State.HELLO_SENT, State.FAILED)),
    # Sent before this HELLO reached the server.
    (State.HELLO_SENT, Batch): Transition(_ignore, (State.HELLO_SENT,)),
    (State.HELLO_SENT, End): Transition(_ignore, (State.HELLO_SENT,)),
    (State.STREAMING, Connected): Transition(_say_hello, (State.HELLO_SENT,)),
    (State.STREAMING, StateLoaded): Transition(_load_state_and_say_hello, (State.HELLO_SENT,)),
    (State.STREAMING, HandedOut): Transition(_hand_out, (State.STREAMING,)),
    (State.STREAMING, EndHandedOut): Transition(_hand_out_end, (State.STREAMING, State.ENDED)),
    (State.STREAMING, Batch): Transition(_batch, (State.STREAMING, State.HELLO_SENT)),
    (State.STREAMING, End): Transition(_end, (State.STREAMING, State.HELLO_SENT)),
    (State.STREAMING, Wait): Transition(_wait, (State.STREAMING,)),
    (State.STREAMING, ServerError): Transition(_error, (State.STREAMING, State.HELLO_SENT, State.FAILED)),
    # A new attempt may form over a connection that is up: the server says so to a reader that said HELLO again.
    (State.STREAMING, Welcome): Transition(_welcome, (State.STREAMING, State.FAILED)),
    (State.STREAMING, Reject): Transition(_reject, (State.FAILED,)),
    (State.STREAMING, GetSnapshot): Transition(_get_snapshot, (State.STREAMING,)),
    (State.ENDED, Connected): Transition(_say_hello_at_end, (State.ENDED,)),
    (State.ENDED, Welcome): Transition(_welcome_at_end, (State.ENDED,)),
    (State.ENDED, GetSnapshot): Transition(_get_snapshot, (State.ENDED,)),
    (State.ENDED, ServerError): Transition(_error_at_end, (State.ENDED,)),
    (State.ENDED, End): Transition(_release, (State.ENDED,)),
    (State.ENDED, Reject): Transition(_release, (State.ENDED,)),
    (State.ENDED, Batch): Transition(_ignore, (State.ENDED,)),
    (State.ENDED, Wait): Transition(_ignore, (State.ENDED,)),
    # What was ready before the failure is handed out before it is raised.
    (State.FAILED, HandedOut): Transition(_hand_out, (State.FAILED,)),
    (State.FAILED, EndHandedOut): Transition(_hand_out_end, (State.FAILED, State.ENDED)),
    (State.FAILED, StateLoaded): Transition(_load_state, (State.FAILED,)),
    **{
        (State.FAILED, event): Transition(_ignore, (State.FAILED,))
        for event in (Connected, Welcome, Reject, GetSnapshot, Batch, Wait, End, ServerError)
    },
}
ROWS = rows_by_state(TRANSITIONS, State)
