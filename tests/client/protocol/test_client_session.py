"""The client half of the protocol: every row of its table, and what is handed out whatever arrives."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import HandshakeRefused, ProtocolError, ServerFailed
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import (
    TRANSITIONS,
    UNANSWERED_LIMIT,
    ClientSession,
    Connected,
    EndHandedOut,
    HandedOut,
    State,
    StateLoaded,
    Unanswered,
)
from packhorse.protocol.effects import Deliver, Effect, Fail, Finish, Forget, Reconnect, Send
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.protocol.transition_table import Transition
from packhorse.wire.digest import digest_of
from packhorse.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    Batch,
    Bye,
    End,
    ErrorCode,
    GetSnapshot,
    Hello,
    Message,
    ServerError,
    Snapshot,
    SnapshotRef,
    Wait,
    Welcome,
)
from tests.client.messages import CONTRACT, DECLARED, EXAMPLES, LAYOUT, altered

ATTEMPT, OTHER = b"attempt!", b"another!"
FINGERPRINT = b"\x55" * 16
NUM_MICROBATCHES = CONTRACT.num_microbatches(LAYOUT)
IDENTITY = Identity(
    stream="train",
    reader=Coordinates(data=1, context=0, tensor=0, pipeline=0),
    client=bytes(range(16)),
    layout=LAYOUT,
    contract=DECLARED,
    window=4,
    start_timeout_s=30.0,
)


def welcome(position: Position = ORIGIN, attempt: bytes = ATTEMPT, fingerprint: bytes = FINGERPRINT) -> Welcome:
    example = EXAMPLES["WELCOME"]
    assert isinstance(example, Welcome)
    return replace(example, position=position, attempt=attempt, fingerprint=fingerprint)


def batch(position: tuple[int, int], low_watermark: Position = ORIGIN, attempt: bytes = ATTEMPT) -> Batch:
    example = EXAMPLES["BATCH"]
    assert isinstance(example, Batch)
    step, index = position
    return altered(
        example, low_watermark=low_watermark, attempt=attempt, body=altered(example.body, step=step, index=index)
    )


def end(position: Position, attempt: bytes = ATTEMPT) -> End:
    return End(stream="train", attempt=attempt, position=position)


def error(code: ErrorCode = ErrorCode.HELLO, *, fatal: bool = False) -> ServerError:
    return ServerError(stream="train", code=code, message="what happened", fatal=fatal)


def snapshot_before(step: int) -> bytes:
    return f"the stream before step {step}".encode()


def frames_of(message: Batch) -> list[bytes]:
    """A payload, and the snapshot behind a step's last micro-batch."""
    last = message.body.index == NUM_MICROBATCHES - 1
    return [b"payload", snapshot_before(message.body.step + 1)] if last else [b"payload"]


def digest_at(position: Position) -> bytes:
    return bytes([position.step, position.index]) * 8


def hand_out(session: ClientSession, count: int = 1) -> None:
    """The server sends and the loop takes this many micro-batches."""
    for _ in range(count):
        at = session.position
        message = batch(at)
        assert session.receive(message, frames_of(message)) == [Deliver(message.body, b"payload")]
        session.handed_out(at, digest_at(at))


def session_in(state: State, taken: int = 0) -> ClientSession:
    """A session that came to ``state`` by what happens, having handed out ``taken`` micro-batches."""
    session = ClientSession(ReaderProgress(IDENTITY))
    if state is State.IDLE:
        return session
    session.connected()
    if state in (State.STREAMING, State.ENDED) or taken:
        session.receive(welcome(), [])
        hand_out(session, taken)
    if state is State.FAILED:
        session.receive(EXAMPLES["REJECT"], [])
    if state is State.HELLO_SENT and taken:
        session.connected()
    if state is State.ENDED:
        session.receive(end(session.position), [])
        session.end_handed_out()
    assert session.state is state
    return session


def sent(effects: Sequence[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def kinds(effects: Sequence[Effect]) -> list[str]:
    """What the effects are, and which messages are sent."""
    return [
        f"Send {type(effect.message).__name__}" if isinstance(effect, Send) else type(effect).__name__
        for effect in effects
    ]


# The table ------------------------------------------------------------------------------------------

HOLDS_SNAPSHOT = NUM_MICROBATCHES  # micro-batches after which a session holds the snapshot before step 1
GET_SNAPSHOT = GetSnapshot(stream="train", step=1, digest=digest_of(snapshot_before(1)))
AT = Position(1, 0)  # where a session stands that has handed out one step
HELLO_AGAIN = ["Forget", "Send Hello"]

TABLE: list[tuple[State, Message, State, list[str]]] = [
    (State.HELLO_SENT, welcome(), State.STREAMING, ["Forget", "Send Ack"]),
    (State.HELLO_SENT, welcome(fingerprint=b"\x66" * 16), State.FAILED, ["Fail"]),
    (State.HELLO_SENT, EXAMPLES["REJECT"], State.FAILED, ["Fail"]),
    (State.HELLO_SENT, GET_SNAPSHOT, State.HELLO_SENT, ["Send Snapshot"]),
    (State.HELLO_SENT, EXAMPLES["WAIT"], State.HELLO_SENT, []),
    (State.HELLO_SENT, error(ErrorCode.HELLO), State.HELLO_SENT, HELLO_AGAIN),
    (State.HELLO_SENT, error(ErrorCode.REJOIN), State.HELLO_SENT, ["Reconnect"]),
    (State.HELLO_SENT, error(ErrorCode.FAILED, fatal=True), State.FAILED, ["Send Bye", "Fail"]),
    (State.HELLO_SENT, batch(AT), State.HELLO_SENT, []),
    (State.HELLO_SENT, end(AT), State.HELLO_SENT, []),
    (State.STREAMING, welcome(), State.STREAMING, ["Forget", "Send Ack"]),
    (State.STREAMING, welcome(fingerprint=b"\x66" * 16), State.FAILED, ["Fail"]),
    (State.STREAMING, EXAMPLES["REJECT"], State.FAILED, ["Fail"]),
    (State.STREAMING, GET_SNAPSHOT, State.STREAMING, ["Send Snapshot"]),
    (State.STREAMING, EXAMPLES["WAIT"], State.STREAMING, []),
    (State.STREAMING, error(ErrorCode.HELLO), State.HELLO_SENT, HELLO_AGAIN),
    (State.STREAMING, error(ErrorCode.REJOIN), State.STREAMING, ["Reconnect"]),
    (State.STREAMING, error(ErrorCode.DIVERGED, fatal=True), State.FAILED, ["Send Bye", "Fail"]),
    (State.STREAMING, batch(AT), State.STREAMING, ["Deliver"]),
    (State.STREAMING, batch((9, 0)), State.HELLO_SENT, HELLO_AGAIN),
    (State.STREAMING, end(AT), State.STREAMING, ["Finish"]),
    (State.STREAMING, end(Position(9, 0)), State.HELLO_SENT, HELLO_AGAIN),
    (State.ENDED, welcome(), State.ENDED, ["Send Ack"]),
    (State.ENDED, welcome(attempt=OTHER), State.ENDED, []),
    (State.ENDED, GET_SNAPSHOT, State.ENDED, ["Send Snapshot"]),
    (State.ENDED, error(), State.ENDED, ["Send Hello"]),
    (State.ENDED, error(ErrorCode.REJOIN), State.ENDED, ["Reconnect"]),
    *(
        (State.ENDED, message, State.ENDED, [])
        for message in (EXAMPLES["REJECT"], EXAMPLES["WAIT"], error(fatal=True), batch(AT), end(AT))
    ),
    *(
        (State.FAILED, message, State.FAILED, [])
        for message in (
            welcome(attempt=OTHER),
            EXAMPLES["REJECT"],
            EXAMPLES["WAIT"],
            error(fatal=True),
            batch(AT),
            end(AT),
        )
    ),
    (State.FAILED, GET_SNAPSHOT, State.FAILED, []),
    # A reader that has ended answers, so that the others can go on.
    (State.ENDED, welcome(), State.ENDED, ["Send Ack"]),
    (State.ENDED, GET_SNAPSHOT, State.ENDED, ["Send Snapshot"]),
    (State.ENDED, error(ErrorCode.HELLO), State.ENDED, ["Send Hello"]),
    (State.ENDED, error(ErrorCode.REJOIN), State.ENDED, ["Reconnect"]),
]


@pytest.mark.parametrize(("state", "message", "after", "effects"), TABLE)
def test_each_row_of_the_table_leads_where_it_says(
    state: State, message: Message, after: State, effects: list[str]
) -> None:
    session = session_in(state, taken=0 if state is State.FAILED else HOLDS_SNAPSHOT)
    extra = [b"payload"] if isinstance(message, Batch) else []
    assert kinds(session.receive(message, extra)) == effects
    assert session.state is after


LATER = FeedState("train", Position(1, 0), FINGERPRINT, snapshot_before(1))


def take(session: ClientSession) -> None:
    session.handed_out(session.position, digest_at(session.position))


def take_end_of_pass(session: ClientSession) -> None:
    """END came with the snapshot of the next pass."""
    session.progress.snapshots.add(session.position.step + 1, b"the next pass")
    session.end_handed_out()


def wait_in_vain(session: ClientSession) -> list[Effect]:
    return [effect for _ in range(UNANSWERED_LIMIT) for effect in session.interval_passed()]


# state, micro-batches handed out before, event, what happens, the state it leads to, effects
LOOP: list[tuple[State, int, type, Callable[[ClientSession], list[Effect] | None], State, list[str]]] = [
    (State.IDLE, 0, Connected, ClientSession.connected, State.HELLO_SENT, HELLO_AGAIN),
    (State.HELLO_SENT, 0, Connected, ClientSession.connected, State.HELLO_SENT, HELLO_AGAIN),
    (State.STREAMING, 2, Connected, ClientSession.connected, State.HELLO_SENT, HELLO_AGAIN),
    (State.ENDED, 2, Connected, ClientSession.connected, State.ENDED, ["Send Hello"]),
    (State.FAILED, 0, Connected, ClientSession.connected, State.FAILED, []),
    (State.HELLO_SENT, 0, Unanswered, wait_in_vain, State.HELLO_SENT, HELLO_AGAIN),
    (State.IDLE, 0, StateLoaded, lambda session: session.resume(LATER), State.IDLE, []),
    (State.HELLO_SENT, 0, StateLoaded, lambda session: session.resume(LATER), State.HELLO_SENT, HELLO_AGAIN),
    (State.STREAMING, 0, StateLoaded, lambda session: session.resume(LATER), State.HELLO_SENT, HELLO_AGAIN),
    (State.FAILED, 0, StateLoaded, lambda session: session.resume(LATER), State.FAILED, []),
    (State.STREAMING, 2, HandedOut, take, State.STREAMING, []),
    (State.FAILED, 2, HandedOut, take, State.FAILED, []),
    (State.STREAMING, 2, EndHandedOut, ClientSession.end_handed_out, State.ENDED, []),
    (State.STREAMING, 2, EndHandedOut, take_end_of_pass, State.STREAMING, []),
    (State.FAILED, 2, EndHandedOut, ClientSession.end_handed_out, State.ENDED, []),
    (State.FAILED, 2, EndHandedOut, take_end_of_pass, State.FAILED, []),
]


@pytest.mark.parametrize(("state", "taken", "happens", "after", "effects"), [(*row[:2], *row[3:]) for row in LOOP])
def test_each_row_of_the_loop_leads_where_it_says(
    state: State,
    taken: int,
    happens: Callable[[ClientSession], list[Effect] | None],
    after: State,
    effects: list[str],
) -> None:
    session = session_in(state, taken)
    assert kinds(happens(session) or []) == effects
    assert session.state is after


def test_the_tables_here_have_the_rows_and_next_states_of_the_session() -> None:
    """All but one: a WELCOME that answers what was said before a state was loaded (``loading``)."""
    here = {(state, type(message), after) for state, message, after, _ in TABLE}
    here |= {(state, event, after) for state, _, event, _, after, _ in LOOP}
    here.add((State.HELLO_SENT, Welcome, State.HELLO_SENT))
    assert here == {(state, event, to) for (state, event), row in TRANSITIONS.items() for to in row.to}


def test_a_welcome_from_before_a_state_was_loaded_leaves_hello_unanswered() -> None:
    session = session_in(State.HELLO_SENT)
    session.resume(LATER)
    assert session.receive(welcome(ORIGIN), []) == []
    assert session.state is State.HELLO_SENT


@pytest.mark.parametrize("state", State)
def test_a_state_is_entered_only_where_the_row_leads_there(state: State) -> None:
    session = session_in(State.STREAMING)
    row = Transition[State](print, tuple(other for other in State if other is not state))
    with pytest.raises(ProtocolError, match=rf"STREAMING must not become {state.name}"):
        session._enter(state, row)
    assert session.state is State.STREAMING


ILLEGAL = [
    (state, message) for state in State for message in EXAMPLES.values() if (state, type(message)) not in TRANSITIONS
]


@pytest.mark.parametrize(("state", "message"), ILLEGAL)
def test_a_message_without_a_row_is_refused_and_changes_nothing(state: State, message: Message) -> None:
    session = session_in(state)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError, match=rf"{type(message).__name__} has no place in state {state.name}"):
        session.receive(message, [])
    assert session == before


@pytest.mark.parametrize("state", [State.IDLE, State.HELLO_SENT, State.ENDED])
@pytest.mark.parametrize("happens", [take, ClientSession.end_handed_out])
def test_nothing_is_handed_out_where_nothing_can_be_ready(
    state: State, happens: Callable[[ClientSession], None]
) -> None:
    session = session_in(state, taken=0 if state is State.IDLE else 2)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError, match=f"HandedOut has no place in state {state.name}"):
        happens(session)
    assert session == before


def test_what_only_a_client_says_is_never_received() -> None:
    spoken = {Hello, Snapshot, Ack, Bye}
    assert {(state, type(message)) for state, message in ILLEGAL} == {
        *((state, kind) for state in State for kind in spoken),
        *((State.IDLE, kind) for kind in get_args(Message)),
    }


# HELLO ----------------------------------------------------------------------------------------------


def greeting(session: ClientSession) -> Hello:
    forget, send = session.connected()
    assert forget == Forget(), "what is ready is dropped before HELLO is said"
    assert isinstance(send, Send)
    assert isinstance(send.message, Hello)
    return send.message


def test_a_new_process_says_who_it_is_and_that_it_holds_nothing() -> None:
    session = ClientSession(ReaderProgress(IDENTITY, start=Position(5, 0)))
    hello = greeting(session)
    assert session.state is State.HELLO_SENT
    assert hello == Hello(
        min_version=PROTOCOL_VERSION,
        max_version=PROTOCOL_VERSION,
        stream="train",
        reader=IDENTITY.reader,
        client=IDENTITY.client,
        layout=LAYOUT,
        contract=DECLARED,
        contract_digest=DECLARED.digest(LAYOUT),
        attempt=b"",
        start=Position(5, 0),
        position=Position(5, 0),
        snapshots=(),
        last_digest=b"",
        window=4,
        start_timeout_s=30.0,
    )
    assert not hello.has_handed_out


def test_a_cut_connection_says_hello_with_all_that_the_server_may_need() -> None:
    session = session_in(State.STREAMING, taken=2 * NUM_MICROBATCHES + 1)
    hello = greeting(session)
    assert (hello.attempt, hello.start, hello.position) == (ATTEMPT, ORIGIN, Position(2, 1))
    assert hello.last_digest == digest_at(Position(2, 0))
    assert hello.snapshots == tuple(SnapshotRef(step, digest_of(snapshot_before(step))) for step in (1, 2))
    assert hello.has_handed_out


@pytest.mark.parametrize("state", [State.IDLE, State.HELLO_SENT, State.STREAMING])
def test_every_new_connection_says_hello_until_the_end(state: State) -> None:
    session = session_in(state)
    assert greeting(session).position == ORIGIN
    assert session.state is State.HELLO_SENT


def test_hello_is_said_at_the_position_of_the_loop_and_not_of_what_was_received() -> None:
    session = session_in(State.STREAMING)
    for index in range(3):
        session.receive(batch((0, index)), [b"payload"])
    session.handed_out(ORIGIN, digest_at(ORIGIN))
    assert greeting(session).position == session.progress.expected == Position(0, 1)


def test_a_reader_that_has_ended_says_hello_behind_the_end_and_keeps_its_end() -> None:
    """The others cannot go on at another server before it has come too; its own loop is over."""
    session = session_in(State.ENDED, taken=NUM_MICROBATCHES)
    (hello,) = sent(session.connected())
    assert isinstance(hello, Hello)
    assert (hello.attempt, hello.position) == (ATTEMPT, Position(2, 0))
    assert session.receive(welcome(), []) == [Send(session.ack(0.0))]
    assert kinds(session.connected()) == ["Send Hello"], "what told the loop of the end is not forgotten"
    assert session.state is State.ENDED


def test_a_hello_that_nobody_answers_is_said_again() -> None:
    session = session_in(State.HELLO_SENT)
    for _ in range(UNANSWERED_LIMIT - 1):
        assert session.interval_passed() == []
    session.receive(EXAMPLES["WAIT"], [])
    for _ in range(UNANSWERED_LIMIT - 1):
        assert session.interval_passed() == [], "the server knows of it"
    assert kinds(session.interval_passed()) == HELLO_AGAIN
    assert session.unanswered == 0


@pytest.mark.parametrize("state", [State.IDLE, State.STREAMING, State.ENDED, State.FAILED])
def test_only_a_reader_that_greets_waits_for_an_answer(state: State) -> None:
    session = session_in(state)
    assert [session.interval_passed() for _ in range(2 * UNANSWERED_LIMIT)] == [[]] * 2 * UNANSWERED_LIMIT


@pytest.mark.parametrize(
    ("message", "released"),
    [
        (end(Position(0, 1)), True),
        (error(fatal=True), True),
        (EXAMPLES["REJECT"], True),
        (EXAMPLES["WAIT"], False),
        (error(), False),
        (welcome(), False),
    ],
)
def test_it_is_needed_until_the_end_is_said_again_or_nothing_can_be_mended(message: Message, released: bool) -> None:
    session = session_in(State.ENDED, taken=2)
    assert not session.progress.released
    session.receive(message, [])
    assert session.progress.released is released


def test_a_reader_that_has_failed_says_nothing() -> None:
    session = session_in(State.FAILED)
    assert session.connected() == []
    assert session.state is State.FAILED


@pytest.mark.parametrize("state", State)
def test_bye_says_whether_the_end_was_handed_out(state: State) -> None:
    assert session_in(state).bye() == Bye(stream="train")


# WELCOME --------------------------------------------------------------------------------------------


def test_welcome_brings_attempt_contract_and_fingerprint_and_is_acknowledged() -> None:
    session = session_in(State.HELLO_SENT)
    assert sent(session.receive(welcome(), [])) == [
        Ack(stream="train", attempt=ATTEMPT, position=ORIGIN, loop_idle_s=0.0)
    ]
    assert session.progress.agreed is not None
    assert session.progress.agreed.contract == CONTRACT
    assert (session.attempt, session.progress.fingerprint) == (ATTEMPT, FINGERPRINT)


def test_welcome_brings_what_the_server_warns_of() -> None:
    session = session_in(State.HELLO_SENT)
    assert not session.progress.warnings
    session.receive(welcome(), [])
    assert [warning.rule for warning in session.progress.warnings] == ["PER_TOKEN_LOSS"]
    session.receive(replace(welcome(), warnings=()), [])
    assert not session.progress.warnings


def test_welcome_drops_what_was_not_handed_out() -> None:
    session = session_in(State.STREAMING)
    for index in range(3):
        session.receive(batch((0, index)), [b"payload"])
    session.handed_out(ORIGIN, digest_at(ORIGIN))
    assert session.receive(welcome(), [])[0] == Forget()
    assert session.position == session.progress.expected == Position(0, 1)
    hand_out(session, 3)


def test_welcome_below_the_position_only_brings_duplicates() -> None:
    session = session_in(State.HELLO_SENT, taken=3)
    session.receive(welcome(ORIGIN), [])
    for index in range(3):
        assert session.receive(batch((0, index)), [b"payload"]) == []
    hand_out(session)


@pytest.mark.parametrize("state", [State.HELLO_SENT, State.STREAMING])
def test_welcome_above_the_position_is_refused_and_changes_nothing(state: State) -> None:
    session = session_in(state, taken=3)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError, match="WELCOME at"):
        session.receive(welcome(Position(1, 0)), [])
    assert session == before


@pytest.mark.parametrize("state", [State.HELLO_SENT, State.STREAMING])
def test_the_same_attempt_with_another_fingerprint_is_fatal(state: State) -> None:
    session = session_in(state, taken=3)
    (failure,) = session.receive(welcome(ORIGIN, fingerprint=b"\x77" * 16), [])
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, ProtocolError)
    assert "same attempt" in str(failure.error)
    assert (session.state, session.progress.fingerprint, session.position) == (
        State.FAILED,
        FINGERPRINT,
        Position(0, 3),
    )


def test_another_attempt_may_be_another_stream_where_nothing_was_handed_out() -> None:
    session = session_in(State.STREAMING)
    session.receive(welcome(ORIGIN, attempt=OTHER, fingerprint=b"\x77" * 16), [])
    assert (session.state, session.attempt, session.progress.fingerprint) == (State.STREAMING, OTHER, b"\x77" * 16)
    assert session.receive(batch((0, 0)), [b"payload"]) == [], "a frame of the attempt before"
    assert kinds(session.receive(batch((0, 0), attempt=OTHER), [b"payload"])) == ["Deliver"]


@pytest.mark.parametrize("state", [State.HELLO_SENT, State.STREAMING])
def test_another_attempt_is_refused_where_something_was_handed_out(state: State) -> None:
    """A new attempt begins with readers that stand at their start: two attempts never mix in one loop."""
    session = session_in(state, taken=3)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError):
        session.receive(welcome(ORIGIN, attempt=OTHER, fingerprint=b"\x77" * 16), [])
    assert session == before


# Delivery -------------------------------------------------------------------------------------------


def test_micro_batches_are_delivered_in_order_across_steps() -> None:
    session = session_in(State.STREAMING)
    hand_out(session, 3 * NUM_MICROBATCHES + 1)
    assert session.position == Position(3, 1)
    assert session.progress.last_digest == digest_at(Position(3, 0))


def test_receiving_moves_what_is_expected_and_only_handing_out_moves_the_position() -> None:
    session = session_in(State.STREAMING)
    session.receive(batch((0, 0)), [b"payload"])
    session.receive(batch((0, 1)), [b"payload"])
    assert (session.position, session.progress.expected) == (ORIGIN, Position(0, 2))
    session.handed_out(ORIGIN, digest_at(ORIGIN))
    assert (session.position, session.progress.expected) == (Position(0, 1), Position(0, 2))


@pytest.mark.parametrize("position", [(0, 0), (0, 2), (0, 3)])
def test_a_duplicate_is_dropped_and_changes_nothing(position: tuple[int, int]) -> None:
    session = session_in(State.STREAMING, taken=3)
    session.receive(batch((0, 3)), frames_of(batch((0, 3))))
    before = copy.deepcopy(session)
    assert session.receive(batch(position, low_watermark=Position(9, 0)), [b"other payload"]) == []
    assert session == before


@pytest.mark.parametrize("position", [(0, 3), (1, 0), (7, 2)])
def test_a_gap_says_hello_again_at_the_position(position: tuple[int, int]) -> None:
    session = session_in(State.STREAMING, taken=1)
    session.receive(batch((0, 1)), [b"payload"])
    effects = session.receive(batch(position), [b"payload"])
    assert kinds(effects) == HELLO_AGAIN
    (hello,) = sent(effects)
    assert isinstance(hello, Hello)
    assert hello.position == session.position == session.progress.expected == Position(0, 1)
    assert session.state is State.HELLO_SENT


@pytest.mark.parametrize("message", [batch((0, 1), attempt=OTHER), batch((5, 0), attempt=OTHER)])
def test_a_micro_batch_of_another_attempt_is_dropped_and_changes_nothing(message: Batch) -> None:
    session = session_in(State.STREAMING, taken=1)
    before = copy.deepcopy(session)
    assert session.receive(message, [b"payload", b"snapshot"]) == []
    assert session == before


@pytest.mark.parametrize("position", [Position(0, 1), Position(1, 0)])
def test_the_end_of_another_attempt_is_dropped_and_changes_nothing(position: Position) -> None:
    session = session_in(State.STREAMING, taken=1)
    before = copy.deepcopy(session)
    assert session.receive(end(position, OTHER), []) == []
    assert session == before


@pytest.mark.parametrize("position", [ORIGIN, Position(0, 2), Position(1, 0)])
def test_only_the_micro_batch_at_the_position_is_handed_out(position: Position) -> None:
    session = session_in(State.STREAMING, taken=1)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError):
        session.handed_out(position, digest_at(position))
    assert session == before


def test_the_end_has_a_position_and_is_acknowledged() -> None:
    session = session_in(State.STREAMING, taken=NUM_MICROBATCHES)
    assert session.receive(end(Position(1, 0)), []) == [Finish()]
    assert (session.state, session.position) == (State.STREAMING, Position(1, 0))
    session.end_handed_out()
    assert (session.state, session.position) == (State.ENDED, Position(2, 0))
    assert session.ack(3.5) == Ack(stream="train", attempt=ATTEMPT, position=Position(2, 0), loop_idle_s=3.5)


def test_behind_the_end_of_a_pass_the_next_one_goes_on() -> None:
    session = session_in(State.STREAMING, taken=NUM_MICROBATCHES)
    assert session.receive(end(Position(1, 0)), [snapshot_before(2)]) == [Finish()]
    assert kinds(session.receive(batch((2, 0)), [b"payload"])) == ["Deliver"]
    session.end_handed_out()
    assert (session.state, session.position, session.progress.last_digest) == (State.STREAMING, Position(2, 0), b"")
    assert session.saved().snapshot == snapshot_before(2)
    session.handed_out(Position(2, 0), digest_at(Position(2, 0)))
    assert session.position == Position(2, 1)


def test_the_end_twice_is_a_duplicate() -> None:
    session = session_in(State.STREAMING, taken=NUM_MICROBATCHES)
    session.receive(end(Position(1, 0)), [])
    before = copy.deepcopy(session)
    assert session.receive(end(Position(1, 0)), []) == []
    assert session == before


def test_an_end_behind_a_gap_says_hello_again() -> None:
    session = session_in(State.STREAMING, taken=1)
    assert kinds(session.receive(end(Position(1, 0)), [])) == HELLO_AGAIN
    assert (session.state, session.position) == (State.HELLO_SENT, Position(0, 1))


# What the server waits for, and errors --------------------------------------------------------------


@pytest.mark.parametrize("news", [welcome(), batch(ORIGIN), end(ORIGIN)])
def test_what_the_server_waits_for_is_kept_until_something_arrives(news: Message) -> None:
    session = session_in(State.STREAMING)
    wait = EXAMPLES["WAIT"]
    assert isinstance(wait, Wait)
    session.receive(wait, [])
    assert session.waiting == wait
    session.receive(batch((5, 0), attempt=OTHER), [b"payload"])
    assert session.waiting == wait, "nothing has arrived that counts"
    session.receive(news, [b"payload"] if isinstance(news, Batch) else [])
    assert session.waiting is None


@pytest.mark.parametrize("state", [State.HELLO_SENT, State.STREAMING])
def test_a_refusal_carries_every_violation(state: State) -> None:
    session = session_in(state)
    (failure,) = session.receive(EXAMPLES["REJECT"], [])
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, HandshakeRefused)
    assert [violation.rule for violation in failure.error.violations] == ["WINDOW"]
    assert session.state is State.FAILED


@pytest.mark.parametrize("code", ErrorCode)
def test_a_fatal_error_is_raised_in_the_loop_with_the_servers_words(code: ErrorCode) -> None:
    session = session_in(State.STREAMING)
    bye, failure = session.receive(error(code, fatal=True), [])
    assert bye == Send(Bye(stream="train")), "the server waits for it before it goes"
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, ServerFailed)
    assert str(failure.error) == "what happened"
    assert session.state is State.FAILED


def test_rejoin_closes_and_says_hello_on_the_next_connection() -> None:
    session = session_in(State.STREAMING, taken=2)
    assert session.receive(error(ErrorCode.REJOIN), []) == [Reconnect()]
    assert greeting(session).position == Position(0, 2)


# Snapshots ------------------------------------------------------------------------------------------


def held(session: ClientSession) -> list[int]:
    return sorted(session.progress.snapshots)


def after_steps(count: int) -> ClientSession:
    session = session_in(State.STREAMING, taken=count * NUM_MICROBATCHES)
    assert held(session) == list(range(1, count + 1)), "the low watermark has not moved"
    return session


@pytest.mark.parametrize(
    ("low_watermark", "kept"),
    [
        (Position(0, 0), [1, 2, 3, 4, 5]),
        (Position(0, 3), [1, 2, 3, 4, 5]),
        (Position(1, 0), [1, 2, 3, 4, 5]),
        (Position(2, 0), [2, 3, 4, 5]),
        (Position(2, 3), [2, 3, 4, 5]),
        (Position(4, 1), [4, 5]),
        # One below the step in training, for a loop that has taken of a step that it has not trained.
        (Position(5, 0), [4, 5]),
        (Position(9, 0), [4, 5]),
    ],
)
def test_snapshots_are_kept_from_the_last_at_or_below_the_low_watermark(
    low_watermark: Position, kept: list[int]
) -> None:
    session = after_steps(5)
    session.receive(batch((5, 0), low_watermark=low_watermark), [b"payload"])
    assert held(session) == kept
    assert all(session.progress.snapshots[step] == snapshot_before(step) for step in kept)


def test_a_snapshot_that_arrives_is_the_stream_behind_its_step() -> None:
    session = session_in(State.STREAMING, taken=NUM_MICROBATCHES - 1)
    assert held(session) == []
    buffer = bytearray(snapshot_before(1))
    session.receive(batch((0, 3)), [b"payload", memoryview(buffer)])
    buffer[:] = bytes(len(buffer))
    assert session.progress.snapshots == {1: snapshot_before(1)}, "a copy: the frame's memory goes with the frame"


def test_a_snapshot_is_given_when_it_is_asked_for_by_digest() -> None:
    session = after_steps(2)
    give = GetSnapshot(stream="train", step=2, digest=digest_of(snapshot_before(2)))
    assert session.receive(give, []) == [Send(Snapshot(stream="train", step=2), (snapshot_before(2),))]


@pytest.mark.parametrize(
    "give",
    [
        GetSnapshot(stream="train", step=3, digest=digest_of(snapshot_before(3))),
        GetSnapshot(stream="train", step=2, digest=digest_of(snapshot_before(1))),
        GetSnapshot(stream="train", step=0, digest=bytes(16)),
    ],
)
def test_a_snapshot_that_is_not_held_is_refused_and_changes_nothing(give: GetSnapshot) -> None:
    session = after_steps(2)
    before = copy.deepcopy(session)
    with pytest.raises(ProtocolError, match=f"step {give.step} that is not held"):
        session.receive(give, [])
    assert session == before


# Whatever arrives -----------------------------------------------------------------------------------

EVENTS = st.one_of(
    st.tuples(st.just("batch"), st.integers(-2, 2)),
    st.tuples(st.just("next"), st.just(0)),
    st.tuples(st.just("stale"), st.integers(-2, 2)),
    st.tuples(st.just("take"), st.integers(1, 3)),
    st.tuples(st.just("connected"), st.just(0)),
    st.tuples(st.just("welcome"), st.integers(0, 4)),
)


def place(number: int) -> Position:
    return Position(*divmod(max(number, 0), NUM_MICROBATCHES))


def number_of(position: Position) -> int:
    return position.step * NUM_MICROBATCHES + position.index


@given(st.lists(EVENTS, max_size=60))
def test_whatever_arrives_the_loop_is_handed_every_position_once_and_in_order(events: list[tuple[str, int]]) -> None:
    session = session_in(State.STREAMING)
    ready: deque[Position] = deque()
    taken: list[Position] = []

    def carry_out(effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Forget():
                    ready.clear()
                case Deliver(body, _):
                    ready.append(Position(body.step, body.index))
                case Send(message):
                    assert not isinstance(message, Hello) or message.position == session.position

    for event, number in events:
        before = session.position
        match event:
            case "take":
                for _ in range(min(number, len(ready))):
                    taken.append(ready.popleft())
                    session.handed_out(taken[-1], digest_at(taken[-1]))
            case "connected":
                carry_out(session.connected())
            case "welcome":
                carry_out(session.receive(welcome(place(number_of(session.position) - number)), []))
            case _:
                offset = 0 if event == "next" else number
                message = batch(place(number_of(session.progress.expected) + offset), low_watermark=session.position)
                message = altered(message, attempt=OTHER if event == "stale" else ATTEMPT)
                carry_out(session.receive(message, frames_of(message)))
        assert event == "take" or session.position == before
        assert taken == [place(n) for n in range(len(taken))]
        assert [number_of(p) for p in ready] == list(range(len(taken), len(taken) + len(ready)))
        assert len([step for step in session.progress.snapshots if step <= session.position.step]) <= 1 + 1
