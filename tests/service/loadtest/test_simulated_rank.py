"""A simulated rank asks, waits and thinks as a training loop does, by a clock that the test holds."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from packhorse.contract.layout import ParallelLayout
from packhorse.contract.position import Position
from packhorse.protocol.client_session import ClientSession
from packhorse.protocol.effects import Deliver, Finish, Send
from packhorse.protocol.reader_progress import ReaderProgress
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.wire.messages import Ack, Bye, End, Hello, Wait, WaitReason
from packhorse_service.loadtest.ranks.rank_counters import MeasureWindow, RankCounters, RebuiltMicroBatch
from packhorse_service.loadtest.ranks.simulated_loop import SimulatedLoop, ThinkTime
from packhorse_service.loadtest.ranks.simulated_rank import SimulatedRank
from tests.client.protocol.test_client_session import IDENTITY, NUM_MICROBATCHES, batch, end, welcome
from tests.client.test_feed import A_LONG_STEP, IN_LONG_STEPS, LONG_STEP, ScriptedServer, feed_from, saying, taking
from tests.client.test_feed import batch as long_step_batch
from tests.harness import wait_until

THINK_S = 2.0
READER = ParallelLayout().coordinates(0)
MEASURED = MeasureWindow(begin_s=0.0, end_s=1000.0)


def taken(number: int, ready_s: float, *, filler: bool = False) -> RebuiltMicroBatch:
    position = Position(number // NUM_MICROBATCHES, number % NUM_MICROBATCHES)
    return RebuiltMicroBatch(
        position=position,
        row_digest=bytes(16),
        tokens=100,
        delivered=50.0,
        filler=filler,
        wire_bytes=220,
        ready_s=ready_s,
        verified=True,
    )


def streaming(
    think_time: ThinkTime | None = None, measured: MeasureWindow = MEASURED, at: float = 10.0
) -> SimulatedRank:
    """A rank that has its WELCOME at ``at`` and asks for its first micro-batch."""
    loop = SimulatedLoop(think_time or ThinkTime(THINK_S, 0.0), random.Random(0))
    rank = SimulatedRank(ReadyQueue(ClientSession(ReaderProgress(IDENTITY))), loop, RankCounters(measured))
    rank.came_up(at)
    rank.receive(welcome(), (), at)
    return rank


def give(rank: SimulatedRank, number: int, at: float) -> list[object]:
    """The server's next micro-batch, there at ``at``."""
    micro_batch = taken(number, at)
    effects = rank.receive(batch(micro_batch.position), (b"payload",), at)
    assert [type(effect) for effect in effects] == [Deliver]
    return list(rank.delivered(micro_batch, at))


def acked(effects: list[object]) -> list[Position]:
    return [e.message.position for e in effects if isinstance(e, Send) and isinstance(e.message, Ack)]


def test_a_connection_says_hello_and_welcome_is_acknowledged() -> None:
    rank = SimulatedRank(
        ReadyQueue(ClientSession(ReaderProgress(IDENTITY))), SimulatedLoop(ThinkTime(THINK_S, 0.0), random.Random(0))
    )
    hello = [effect.message for effect in rank.came_up(1.0) if isinstance(effect, Send)]
    assert [type(message) for message in hello] == [Hello]
    assert acked(list(rank.receive(welcome(), (), 3.0))) == [Position(0, 0)]
    assert (rank.welcomed_s, rank.loop.asking_since) == (3.0, 3.0)


def test_the_first_micro_batch_starts_the_rank_and_is_no_wait() -> None:
    rank = streaming()
    assert acked(give(rank, 0, 15.0)) == [], "the server waits for no less than half a window"
    assert rank.first_taken_s == 15.0
    assert rank.counters.micro_batches == 0
    assert rank.due == pytest.approx(min(17.0, rank.keep_alive_at))


def test_a_micro_batch_that_is_there_when_asked_for_is_taken_without_a_wait() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    assert give(rank, 1, 16.0) == [], "it thinks about the first"
    assert acked(list(rank.tick(17.0)))[0] == Position(0, 2)
    assert (rank.counters.micro_batches, rank.counters.waits.max_s) == (1, 0.0)


def test_a_wait_is_from_asking_to_having() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    rank.tick(17.0)
    assert rank.loop.asking_since == 17.0
    give(rank, 1, 17.75)
    assert rank.counters.waits.max_s == pytest.approx(0.75)
    assert rank.loop.think_until == pytest.approx(17.75 + THINK_S)


def test_a_late_load_test_does_not_count_as_a_wait_for_the_server() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    give(rank, 1, 16.0)
    rank.tick(18.5)  # it was due at 17
    assert rank.counters.waits.max_s == 0.0
    assert rank.loop.think_until == pytest.approx(17.0 + THINK_S), "the loop asked at 17, whenever that was noticed"


def test_several_that_became_due_meanwhile_are_acknowledged_where_half_a_window_is() -> None:
    rank = streaming(ThinkTime(0.1, 0.0))
    give(rank, 0, 15.0)
    for number in (1, 2):
        give(rank, number, 15.01)
    rank.keep_alive_at = 100.0
    assert acked(list(rank.tick(15.25))) == [Position(0, 2)]
    assert rank.queue.unacknowledged == 1
    assert rank.counters.micro_batches == 2


def test_a_rank_acknowledges_as_a_trainer_does_that_takes_the_same(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/feed"
    with ScriptedServer(endpoint, saying(*A_LONG_STEP)) as server, feed_from(endpoint, window=8) as feed:
        wait_until(lambda: bool(server.heard_of(Ack)), "the ACK of WELCOME")
        of_trainer = [position for count in (4, 4, 2) for position in taking(feed, count, server)]
    rank = SimulatedRank(
        ReadyQueue(ClientSession(ReaderProgress(replace(IDENTITY, layout=ParallelLayout(), reader=READER, window=8)))),
        SimulatedLoop(ThinkTime(0.0, 0.0), random.Random(0)),
    )
    rank.came_up(0.0)
    rank.receive(IN_LONG_STEPS, (), 0.0)
    of_rank: list[Position] = []
    for index in range(LONG_STEP):
        micro_batch = replace(taken(index, 1.0), position=Position(0, index))
        rank.receive(long_step_batch(0, index), (b"payload",), 1.0)
        of_rank += acked(list(rank.delivered(micro_batch, 1.0)))
    assert of_rank == of_trainer == [Position(0, 4), Position(0, 8), Position(1, 0)]


def test_only_what_is_taken_in_the_period_counts() -> None:
    rank = streaming(measured=MeasureWindow(begin_s=17.0, end_s=19.0))
    give(rank, 0, 15.0)
    for number, at in ((1, 16.9), (2, 18.9), (3, 20.9)):
        rank.tick(at + 0.1)
        give(rank, number, at + 0.1)
    assert (rank.counters.micro_batches, rank.taken) == (1, 4)


def test_fillers_are_micro_batches_without_tokens() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    rank.receive(batch((0, 1)), (b"payload",), 16.0)
    rank.delivered(taken(1, 16.0, filler=True), 16.0)
    rank.tick(17.0)
    assert (rank.counters.micro_batches, rank.counters.fillers, rank.counters.tokens) == (1, 1, 0)


def test_a_rank_that_stops_takes_nothing_until_it_resumes() -> None:
    rank = streaming(ThinkTime(THINK_S, 0.0, stops=True), replace(MEASURED, stop_s=16.0, resume_s=40.0))
    give(rank, 0, 15.0)
    give(rank, 1, 15.5)
    rank.tick(17.0)
    assert (rank.taken, rank.loop.think_until) == (1, 40.0)
    idle = [e.message.loop_idle_s for e in rank.tick(30.0) if isinstance(e, Send) and isinstance(e.message, Ack)]
    assert idle == [pytest.approx(15.0)], "it lives, and says that its loop does not ask"
    rank.tick(40.0)
    assert rank.taken == 2


def test_a_wait_during_a_stop_is_counted_apart() -> None:
    rank = streaming(measured=replace(MEASURED, stop_s=18.0, resume_s=30.0))
    give(rank, 0, 15.0)
    rank.tick(17.0)
    give(rank, 1, 31.0)
    assert rank.counters.waits.count == 0
    assert rank.counters.stopped_waits.max_s == pytest.approx(14.0)


def test_what_the_server_waits_for_is_counted_while_this_rank_waits() -> None:
    rank = streaming()
    rank.session.progress.keep_alive_s = 0.25
    give(rank, 0, 15.0)
    wait = Wait(
        stream="train",
        reason=WaitReason.SLOW_READERS,
        ranks=("rank 1 (dp1·cp0·tp0·pp0): its loop last asked 4 s ago", "and 3 more"),
        waited_s=1.0,
    )
    rank.receive(wait, (), 16.0)
    assert not rank.counters.waiting_for, "it is thinking"
    rank.tick(17.0)
    rank.receive(wait, (), 18.0)
    named = ("slow readers", "slow readers: rank 1 (dp1·cp0·tp0·pp0)", "slow readers: others")
    assert rank.counters.waiting_for == dict.fromkeys(named, 250), "milliseconds: as often as the server says it"


def test_it_says_every_keep_alive_interval_that_it_lives() -> None:
    rank = streaming(at=10.0)
    assert rank.due == 10.0 + rank.session.progress.keep_alive_s
    assert acked(list(rank.tick(11.0))) == [Position(0, 0)]
    assert rank.due == 12.0


def test_without_a_connection_it_says_nothing_and_goes_on_when_there_is_one() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    rank.went_down()
    assert rank.tick(16.0) == []
    assert rank.due < 18.0, "its time goes on"


def test_what_was_not_taken_is_dropped_when_the_connection_breaks() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    give(rank, 1, 15.5)
    rank.went_down()
    hello = [effect.message for effect in rank.came_up(16.0) if isinstance(effect, Send)]
    assert isinstance(hello[0], Hello)
    assert hello[0].position == (0, 1)
    rank.receive(welcome(Position(0, 1)), (), 16.1)
    rank.tick(17.0)
    assert rank.taken == 1, "what it was given before is to be sent again"
    give(rank, 1, 17.2)
    assert rank.taken == 2


def test_the_end_is_taken_and_ends_it() -> None:
    rank = streaming()
    for number in range(NUM_MICROBATCHES):
        give(rank, number, 15.0 + 2 * number)
        rank.tick(17.0 + 2 * number)
    effects = rank.receive(end(Position(1, 0)), (), 40.0)
    assert [type(effect) for effect in effects] == [Finish]
    assert acked(list(rank.delivered(None, 40.0))) == [Position(2, 0)]
    assert rank.ended
    bye = [effect.message for effect in rank.leave(41.0) if isinstance(effect, Send)]
    assert bye[-1] == Bye(stream="train")
    assert isinstance(end(Position(1, 0)), End)


def test_think_times_vary_within_the_jitter() -> None:
    think_time, rng = ThinkTime(1.0, 0.2), random.Random(1)
    times = [think_time.draw_s(rng) for _ in range(1000)]
    assert 0.8 <= min(times) < 0.81
    assert 1.19 < max(times) <= 1.2


def test_a_rank_that_failed_does_nothing_more() -> None:
    rank = streaming()
    give(rank, 0, 15.0)
    rank.fail(ValueError("first"))
    rank.fail(ValueError("second"))
    assert str(rank.error) == "first"
    assert rank.due == float("inf")
