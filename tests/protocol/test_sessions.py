"""Both halves of the protocol together, message by message."""

from __future__ import annotations

import re
from itertools import permutations

import pytest

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.errors import HandshakeRefused, ServerFailed
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import State
from packhorse.protocol.effects import Send as ClientSend
from packhorse.wire.messages import Ack, Bye, ErrorCode, ServerError, WaitReason, encode
from packhorse_service.framing import FramedStep, frame_step
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Send
from packhorse_service.protocol.stream_session import TRANSITIONS
from tests.protocol.network import CONTRACT, LAYOUT, STEPS, Network, Stream, row_of, undisturbed

FIRST, SECOND = Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)


def taken(network: Network, at: Coordinates) -> list[tuple[Position, bytes]]:
    return [(mb.position, mb.computed_digest()) for mb in network.clients[at].taken]


def assert_all_got_everything(network: Network) -> None:
    for at, client in network.clients.items():
        assert client.error is None
        assert taken(network, at) == undisturbed(at)
        assert client.session.state is State.ENDED


def phase_of(network: Network) -> Phase:
    return network.server.session.phase


def meet(network: Network) -> None:
    """Everybody connects and the attempt runs; nothing is taken yet."""
    for at in network.clients:
        network.connect(at)
    while network.server.session.phase is not Phase.RUNNING:
        moved = [network.server.produce(network)]
        for at in network.clients:
            moved += [network.deliver_to_server(at), network.deliver_to_client(at)]
        assert any(moved), "the attempt does not form"


def test_every_reader_gets_every_micro_batch_once_in_order_and_ends_at_the_same_step() -> None:
    network = Network()
    network.settle()
    assert_all_got_everything(network)
    assert network.server.session.phase is Phase.ENDED


def test_nobody_is_served_before_every_reader_has_come_and_the_missing_are_named() -> None:
    network = Network()
    network.connect(FIRST)
    network.deliver_to_server(FIRST)
    network.tick()
    network.deliver_to_client(FIRST)
    client = network.clients[FIRST]
    assert not client.ready
    assert client.session.waiting is not None
    assert client.session.waiting.reason is WaitReason.READERS
    assert client.session.waiting.ranks == ("rank 1 (dp1·cp0·tp0·pp0)",)


def test_the_first_batch_is_sent_when_all_have_acknowledged_their_welcome() -> None:
    network = Network()
    for at in (FIRST, SECOND):
        network.connect(at)
        network.deliver_to_server(at)
    network.server.produce(network)
    network.deliver_to_client(FIRST)
    network.deliver_to_server(FIRST)
    assert phase_of(network) is Phase.WELCOMING
    assert not network.clients[FIRST].to_client
    network.tick()
    network.deliver_to_client(FIRST)
    waiting = network.clients[FIRST].session.waiting
    assert waiting is not None
    assert waiting.reason is WaitReason.ANSWERS
    network.deliver_to_client(SECOND)
    network.deliver_to_server(SECOND)
    assert phase_of(network) is Phase.RUNNING


def test_a_slow_reader_stops_the_stream_within_the_steps_ahead() -> None:
    network = Network()
    meet(network)
    for _ in range(200):
        network.turn(FIRST)
    assert len(network.clients[FIRST].taken) == 2 * network.server.session.spec.steps_ahead
    assert len(network.server.session.buffer.steps) <= network.server.session.spec.steps_ahead + 1
    network.tick()
    network.deliver_to_client(FIRST)
    waiting = network.clients[FIRST].session.waiting
    assert waiting is not None
    assert waiting.reason is WaitReason.SLOW_READERS
    assert waiting.ranks[0].startswith("rank 1 ")
    network.settle()
    assert_all_got_everything(network)


def test_a_cut_connection_continues_where_the_loop_stands() -> None:
    network = Network()
    meet(network)
    for _ in range(3):
        network.turn(FIRST)
    network.cut(FIRST, noticed=False)
    network.settle()
    assert_all_got_everything(network)
    assert network.server.session.attempt.number == 1


@pytest.mark.parametrize("moves", range(0, 60, 3))
def test_a_restarted_server_makes_the_stream_again_from_a_readers_snapshot(moves: int) -> None:
    network = Network()
    meet(network)
    for _ in range(moves):
        network.turn(FIRST)
        if moves % 2:
            network.clients[SECOND].take()
    network.restart_server()
    network.settle()
    assert_all_got_everything(network)


def test_a_restarted_server_that_makes_other_rows_is_found_out() -> None:
    network = Network()
    meet(network)
    for _ in range(20):
        network.turn(FIRST)
    network.clients[FIRST].session.progress.last_digest = bytes(16)
    network.restart_server()
    network.settle()
    for client in network.clients.values():
        assert isinstance(client.error, ServerFailed)
        assert re.match(r"REPLAY_DIVERGED: step \d, index \d, made again for dp0·", str(client.error))
        assert "The row is made of samples of rank 0" in str(client.error)


class OtherData(Stream):
    """The same shape, with other ids in every row."""

    def next_step(self) -> FramedStep | None:
        made = super().next_step()
        if made is None:
            return None
        rows = [[row_of(made.step + 50, rank, index) for index in range(2)] for rank in range(LAYOUT.data)]
        return frame_step(made.step, rows, made.snapshot, CONTRACT, LAYOUT, with_keys=False)


@pytest.mark.parametrize("behind", range(3))
@pytest.mark.parametrize("count", range(1, 2 * STEPS))
def test_other_data_is_found_out_wherever_the_readers_stand(count: int, behind: int) -> None:
    """Also where all stand at the end of a step: the row compared is of the step before. Nothing of it is taken."""
    network = Network()
    meet(network)
    wanted = {FIRST: count, SECOND: max(count - behind, 0)}
    while any(len(network.clients[at].taken) < wanted[at] for at in wanted):
        network.turn(*(at for at in wanted if len(network.clients[at].taken) < wanted[at]))
    network.restart_server()
    network.server.stream = OtherData()
    network.settle()
    for at, client in network.clients.items():
        assert "REPLAY_DIVERGED" in str(client.error)
        assert taken(network, at) == undisturbed(at)[: wanted[at]]


def test_one_new_process_neither_rewinds_nor_stops_the_others_wait() -> None:
    network = Network()
    meet(network)
    for _ in range(8):
        network.turn(FIRST)
    before = len(network.clients[FIRST].taken)
    attempt = network.server.session.attempt.name
    network.restart_client(SECOND)
    network.settle()
    assert network.server.session.attempt.name == attempt
    assert len(network.clients[FIRST].taken) >= before
    assert not network.clients[SECOND].taken
    network.tick()
    for at in network.clients:
        network.deliver_to_client(at)
    waiting = network.clients[FIRST].session.waiting
    assert waiting is not None
    assert "a new process" in waiting.ranks[0]


def test_all_processes_anew_begin_the_next_attempt() -> None:
    network = Network()
    meet(network)
    for _ in range(8):
        network.turn(FIRST, SECOND)
    for at in list(network.clients):
        network.restart_client(at)
    network.settle()
    assert_all_got_everything(network)
    assert network.server.session.attempt.number == 2


def test_new_processes_win_over_the_hellos_of_dead_ones() -> None:
    """All return to a restarted server, die before they are welcomed, and come back as new processes."""
    network = Network()
    meet(network)
    for _ in range(20):
        network.turn(FIRST, SECOND)
    network.restart_server()
    for at in network.clients:
        network.connect(at)
        network.deliver_to_server(at)
    for at in list(network.clients):
        network.cut(at, noticed=False)
        network.restart_client(at)
    network.settle()
    assert_all_got_everything(network)


def test_who_has_ended_stays_until_all_have_also_where_the_server_is_replaced_between_two_ends() -> None:
    network = Network()
    meet(network)
    first, second = network.clients[FIRST], network.clients[SECOND]
    while first.session.state is not State.ENDED:
        network.turn(FIRST, *([SECOND] if len(second.taken) < 2 * STEPS else []))
    assert second.session.state is State.STREAMING
    assert not first.session.progress.released
    network.restart_server()
    network.settle()
    assert_all_got_everything(network)
    assert first.session.progress.released
    assert second.session.progress.released


def test_who_has_ended_need_not_stay_for_one_that_has_left() -> None:
    network = Network()
    meet(network)
    first, second = network.clients[FIRST], network.clients[SECOND]
    while first.session.state is not State.ENDED:
        network.turn(FIRST, *([SECOND] if len(second.taken) < 2 * STEPS else []))
    second.to_server.append([encode(second.session.bye())])
    for _ in range(4):
        network.turn()
    assert first.session.progress.released


@pytest.mark.parametrize("order", list(permutations(["zombie", FIRST, SECOND])))
def test_a_process_of_an_attempt_that_is_over_stops_nobody_where_the_server_is_replaced(
    order: tuple[str | Coordinates, ...],
) -> None:
    network = Network()
    meet(network)
    for _ in range(8):
        network.turn(FIRST, SECOND)
    zombie = network.clients[FIRST].session
    for at in list(network.clients):
        network.restart_client(at)
    meet(network)
    for _ in range(4):
        network.turn(FIRST, SECOND)
    assert all(client.taken for client in network.clients.values())
    network.restart_server()
    for who in order:
        if isinstance(who, Coordinates):
            network.connect(who)
            network.deliver_to_server(who)
        else:
            (_, hello) = zombie.connected()
            assert isinstance(hello, ClientSend)
            network.server_effects(network.server.session.receive(b"zombie", hello.message, (), 0.0))
    network.settle()
    assert_all_got_everything(network)


def test_what_a_stream_is_being_restored_to_for_one_attempt_is_not_served_to_the_next() -> None:
    """Readers say HELLO at the beginning, and load their checkpoint before the server stands there."""
    network = Network()
    meet(network)
    while len(network.clients[FIRST].taken) < 6 or len(network.clients[SECOND].taken) < 6:
        network.turn(FIRST, SECOND)
    saved = network.clients[FIRST].session.saved(3)
    for at in list(network.clients):
        network.restart_client(at)
        network.connect(at)
        network.deliver_to_server(at)
    assert network.server.work, "the stream is to be made again from its beginning"
    for client in network.clients.values():
        network.client_effects(client, client.session.resume(saved))
    for at in network.clients:
        network.deliver_to_server(at)
    while network.server.work:
        network.server.produce(network)
    assert phase_of(network) is Phase.RESTORING, "their snapshot was asked for, and has not come"
    network.settle()
    for at, client in network.clients.items():
        assert client.error is None
        assert taken(network, at) == undisturbed(at)[6:]


def test_a_job_that_another_has_followed_is_told_that_it_is_over_and_stops_nobody() -> None:
    """All its processes live on: its list would be complete too."""
    network = Network()
    meet(network)
    for _ in range(8):
        network.turn(FIRST, SECOND)
    zombies = {at: network.clients[at].session for at in network.clients}
    over = network.server.session.attempt.name
    for at in list(network.clients):
        network.restart_client(at)
        network.connect(at)
    while network.server.session.attempt.name == over or phase_of(network) is not Phase.RUNNING:
        network.turn()
    attempt = network.server.session.attempt.name
    for at, zombie in zombies.items():
        (_, hello) = zombie.connected()
        assert isinstance(hello, ClientSend)
        effects = network.server.session.receive(f"zombie {at}".encode(), hello.message, (), network.now)
        (told,) = [e for e in effects if isinstance(e, Send) and isinstance(e.message, ServerError)]
        assert isinstance(told.message, ServerError)
        assert told.message.fatal
        assert "is over" in told.message.message
    assert network.server.session.attempt.name == attempt
    network.settle()
    assert_all_got_everything(network)


def test_a_reader_with_another_contract_hears_every_difference() -> None:
    network = Network()
    client = network.clients[FIRST]
    contract = BatchContract(seq_length=16, global_batch_size=8)
    object.__setattr__(client.session.progress.identity, "contract", contract)
    network.connect(FIRST)
    network.deliver_to_server(FIRST)
    network.deliver_to_client(FIRST)
    assert isinstance(client.error, HandshakeRefused)
    assert [v.rule for v in client.error.violations] == ["SEQ_LENGTH_MATCH", "RANKS_AGREE"]
    assert client.session.state is State.FAILED


def test_an_acknowledgement_of_what_was_not_sent_moves_nothing() -> None:
    network = Network()
    meet(network)
    session = network.server.session
    reader = session.attempt.readers.by_coordinates[FIRST]
    acked, low_watermark = reader.acked, session.attempt.readers.low_watermark
    beyond = Ack(stream="train", attempt=session.attempt.name, position=Position(5, 0), loop_idle_s=0.0)
    (effect,) = session.receive(reader.peer, beyond, (), 0.0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ServerError)
    assert effect.message.code is ErrorCode.POSITION
    assert (reader.acked, session.attempt.readers.low_watermark) == (acked, low_watermark)


def test_an_acknowledgement_on_an_unknown_connection_is_asked_to_say_hello() -> None:
    network = Network()
    session = network.server.session
    ack = Ack(stream="train", attempt=bytes(8), position=Position(0, 0), loop_idle_s=0.0)
    (effect,) = session.receive(b"?", ack, (), 0.0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ServerError)
    assert effect.message.code is ErrorCode.HELLO
    assert not effect.message.fatal


@pytest.mark.parametrize("phase", list(Phase))
def test_a_message_without_a_row_in_the_table_leaves_the_phase_unchanged(phase: Phase) -> None:
    network = Network()
    meet(network)
    session = network.server.session
    session.attempt.phase = phase
    reader = session.attempt.readers.by_coordinates[FIRST]
    for client_effect in network.clients[FIRST].session.connected():
        if hasattr(client_effect, "message") and (phase, type(client_effect.message)) not in TRANSITIONS:
            raise AssertionError("HELLO is accepted in every phase")
    error = ServerError(stream="train", code=ErrorCode.HELLO, message="", fatal=False)
    (effect,) = session.receive(reader.peer, error, (), 0.0)
    assert isinstance(effect, Send)
    assert session.phase is phase


def test_the_server_is_done_when_all_have_said_bye() -> None:
    network = Network()
    network.settle()
    assert not network.server.session.done
    for at, client in network.clients.items():
        client.to_server.append([encode(client.session.bye())])
        network.deliver_to_server(at)
    assert network.server.session.done


def test_readers_of_a_silent_one_are_told_to_look_for_the_server_again() -> None:
    network = Network()
    meet(network)
    network.server.session.receive(
        network.clients[FIRST].peer, network.clients[FIRST].session.ack(0.0), (), network.now + 59
    )
    network.tick(61)
    messages = [frames[0] for frames in network.clients[FIRST].to_client]
    rejoin = ServerError(
        stream="train",
        code=ErrorCode.REJOIN,
        message="nothing heard from dp1·cp0·tp0·pp0 for 60 s",
        fatal=False,
    )
    assert encode(rejoin) in messages
    network.settle()
    assert_all_got_everything(network)


def test_bye_before_the_attempt_is_forgotten() -> None:
    network = Network()
    network.connect(FIRST)
    network.deliver_to_server(FIRST)
    network.server.session.receive(network.clients[FIRST].peer, Bye(stream="train"), (), 0.0)
    assert network.server.session.rendezvous.missing() == [FIRST, SECOND]


def test_a_failed_stream_waits_until_everybody_has_heard_of_it() -> None:
    """A connection that is closed at once may lose the error that was sent last."""
    network = Network()
    meet(network)
    session = network.server.session
    network.server_effects(session.fail("the shard is broken", network.now))
    for at in (FIRST, SECOND):
        assert not session.failing.heard
        while network.deliver_to_client(at):
            pass
        while network.deliver_to_server(at):
            pass
    assert session.failing.heard
    for client in network.clients.values():
        assert isinstance(client.error, ServerFailed)
        assert "the shard is broken" in str(client.error)


def test_a_snapshot_of_another_stream_refuses_its_readers_and_the_server_serves_the_next() -> None:
    network = Network()
    for client in network.clients.values():
        client.session.progress.load(FeedState("train", Position(3, 0), b"", b"foreign"))
    network.settle()
    for at, client in list(network.clients.items()):
        assert isinstance(client.error, ServerFailed)
        assert "not a snapshot of this stream" in str(client.error)
        network.restart_client(at)
    network.settle()
    assert_all_got_everything(network)


def rejected(network: Network, at: Coordinates) -> list[str]:
    error = network.clients[at].error
    assert isinstance(error, HandshakeRefused), error
    return [str(violation) for violation in error.violations]


def refuse_second(network: Network) -> None:
    identity = network.clients[SECOND].session.progress.identity
    object.__setattr__(identity, "contract", BatchContract(seq_length=16))
    for at in (FIRST, SECOND):
        network.connect(at)
        network.deliver_to_server(at)


def test_at_the_deadline_everybody_hears_the_same_diagnosis_and_the_next_attempt_forms() -> None:
    network = Network()
    refuse_second(network)
    network.deliver_to_client(SECOND)
    (diagnosis,) = rejected(network, SECOND)
    assert diagnosis.startswith("SEQ_LENGTH_MATCH: seq_length of rank 1 (dp1·cp0·tp0·pp0) is 16, must be 8")
    patience = network.clients[FIRST].session.progress.identity.start_timeout_s
    network.tick(patience - 3)
    assert network.server.session.rendezvous.pending(), "not before the deadline"
    network.tick(2)
    while network.deliver_to_client(FIRST):
        pass
    assert rejected(network, FIRST) == [diagnosis]
    for at in (FIRST, SECOND):
        network.restart_client(at)
    network.settle()
    assert_all_got_everything(network)


def test_a_reader_that_never_comes_is_named_at_the_deadline() -> None:
    network = Network()
    network.connect(FIRST)
    network.deliver_to_server(FIRST)
    network.tick(539)
    network.deliver_to_client(FIRST)
    (diagnosis,) = rejected(network, FIRST)
    assert "readers is without rank 1 (dp1·cp0·tp0·pp0), must be complete" in diagnosis


def test_a_coordinate_claimed_twice_is_named_to_those_that_wait() -> None:
    network = Network()
    network.connect(SECOND)
    network.deliver_to_server(SECOND)
    first = network.clients[SECOND]
    network.clients[SECOND] = network._new_client(SECOND)
    network.connect(SECOND)
    network.deliver_to_server(SECOND)
    assert first.peer
    network.tick(539)
    while network.deliver_to_client(SECOND):
        pass
    assert any("rank 1 (dp1·cp0·tp0·pp0) claimed by two processes" in line for line in rejected(network, SECOND))
