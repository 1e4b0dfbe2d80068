"""The iterator itself: what it refuses before it begins, its deadlines, and how it ends.

Where an answer is needed, a ROUTER of a few lines gives it: what a server says is decided by the test.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from packhorse import (
    BatchContract,
    ConfigError,
    Feed,
    HandshakeRefused,
    MicroBatch,
    PackhorseError,
    ParallelLayout,
    ProtocolError,
    ServerFailed,
    StallTimeout,
    StartTimeout,
    TransportError,
)
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import resolve
from packhorse.contract.position import ORIGIN, Position
from packhorse.rows.row import Row
from packhorse.transport import loop_activity
from packhorse.transport.socket_worker import SocketWorker
from packhorse.wire.messages import (
    Ack,
    Batch,
    Bye,
    End,
    ErrorCode,
    Hello,
    Message,
    Reject,
    ServerError,
    Wait,
    WaitReason,
    Welcome,
    decode,
    encode,
)
from tests.client.messages import EXAMPLES
from tests.harness import DEADLINE_S, wait_until
from tests.strategies import ATTEMPT, RowCase, Sample, body_and_payload, lay_out, row_of

SOON_S = 0.2  # a deadline that is meant to pass
LONG_S = 30.0  # one that is not
VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")

LAYOUT = ParallelLayout()
CONTRACT = resolve(BatchContract(), LAYOUT, seq_length=8, global_batch_size=2, vocab_size=100)
SAMPLES = (Sample((11, 12, 13), (12, 13, 14), (1, 1, 0)), Sample((21, 22), (22, 23), (1, 1)))
SLOTS = lay_out(SAMPLES, CONTRACT)
ROW: Row = row_of(SLOTS, SAMPLES, own_labels=False)
CASE = RowCase(LAYOUT, CONTRACT, SAMPLES, False, SLOTS, ROW)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing around the tests tells a rank."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not {thread.name for thread in set(threading.enumerate()) - before}


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    """An endpoint where nobody is."""
    return f"ipc://{tmp_path}/feed"


# A server in a few lines ----------------------------------------------------------------------------

Reply = Message | list[bytes]
Script = Callable[[Message], Sequence[Reply]]


def frames_of(reply: Reply) -> list[bytes]:
    if isinstance(reply, list):
        return reply
    if isinstance(reply, Batch):
        _, payload = body_and_payload(CASE, 0, step=reply.body.step, index=reply.body.index)
        return [encode(reply), bytes(payload)]
    return [encode(reply)]


@dataclass
class ScriptedServer:
    """Answers each message by a script, and keeps what it heard."""

    endpoint: str
    script: Script
    heard: list[Message] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _end: End | None = None  # as it was said last

    def __enter__(self) -> ScriptedServer:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(self.endpoint)
            while not self._stop.is_set():
                if router.poll(5):
                    peer, *frames = router.recv_multipart()
                    message, _ = decode(frames)
                    self.heard.append(message)
                    for reply in (*self.script(message), *self._release(message)):
                        router.send_multipart([peer, *frames_of(reply)])
                        self._end = reply if isinstance(reply, End) else self._end

    def _release(self, message: Message) -> list[Reply]:
        """A reader that has taken END hears it again, as where all others have too."""
        over = self._end is not None and isinstance(message, Ack) and message.position.step > self._end.position.step
        return [self._end] if over and self._end is not None else []

    def heard_of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


def saying(*replies: Reply) -> Script:
    """Say this to HELLO and nothing else."""
    return lambda message: replies if isinstance(message, Hello) else ()


EXAMPLE = EXAMPLES["WELCOME"]
assert isinstance(EXAMPLE, Welcome)
WELCOME = replace(EXAMPLE, position=ORIGIN, contract=CONTRACT)


def batch(step: int, index: int) -> Batch:
    body, _ = body_and_payload(CASE, 0, step=step, index=index)
    return Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=body)


def end(step: int) -> End:
    return End(stream="train", attempt=ATTEMPT, position=Position(step, 0))


TWO_STEPS = (WELCOME, batch(0, 0), batch(0, 1), batch(1, 0), batch(1, 1), end(2))


def feed_from(endpoint: str, **options: Any) -> Feed:
    defaults: dict[str, Any] = {"arrays": "numpy", "start_timeout": LONG_S, "stall_timeout": LONG_S}
    return Feed(endpoint, **{**defaults, **options})


# Before anything is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "nowhere", "tcp://", "tcp://host", "tcp://host:port", "http://host:80", "ipc://"])
def test_an_endpoint_that_cannot_be_is_refused_by_value(bad: str) -> None:
    with pytest.raises(ConfigError) as refused:
        feed_from(bad)
    assert f"endpoint={bad!r}" in str(refused.value)
    assert "tcp://host:port" in str(refused.value)


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_a_rank_outside_the_layout_is_refused(endpoint: str, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"rank={rank} is outside the layout DP2.* 0 to 1"):
        feed_from(endpoint, layout=ParallelLayout(data=2), rank=rank)


def test_a_world_size_that_is_not_the_layouts_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"world size 8 \(from arguments\).*DP2·CP2.* 4 ranks"):
        feed_from(endpoint, layout=ParallelLayout(data=2, context=2), rank=0, world_size=8)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"world size 8 \(from torchrun\).* 1 rank"):
        feed_from(endpoint)


def test_a_rank_that_nobody_tells_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="rank is not known"):
        feed_from(endpoint, layout=ParallelLayout(data=2))


def test_arrays_of_an_unknown_kind_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="arrays='jax'"):
        feed_from(endpoint, arrays="jax")


def test_the_place_of_a_rank_comes_from_its_surroundings(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with feed_from(endpoint, layout=ParallelLayout(data=2, context=2)) as feed:
        assert (feed.rank, str(feed.coordinates)) == (3, "dp1·cp1·tp0·pp0")


# Deadlines ------------------------------------------------------------------------------------------


def test_where_nobody_answers_the_start_has_a_deadline_that_says_what_was_waited_for(endpoint: str) -> None:
    with feed_from(endpoint, layout=ParallelLayout(data=2), rank=1, start_timeout=SOON_S) as feed:
        began = time.monotonic()
        with pytest.raises(StartTimeout) as timeout:
            next(feed)
        assert SOON_S <= time.monotonic() - began < SOON_S + 5
    told = str(timeout.value)
    for part in (
        "rank 1 (dp1·cp0·tp0·pp0)",
        f"waited {SOON_S:g} s (start_timeout)",
        endpoint,
        "no connection",
        "nobody has answered",
    ):
        assert part in told
    assert isinstance(timeout.value, TimeoutError)


def test_an_unanswered_tcp_port_says_so_too() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
    with (
        feed_from(f"tcp://127.0.0.1:{port}", start_timeout=SOON_S) as feed,
        pytest.raises(StartTimeout, match=str(port)),
    ):
        next(feed)


def test_what_the_server_waits_for_is_in_the_message(endpoint: str) -> None:
    wait = Wait(stream="train", reason=WaitReason.READERS, ranks=("rank 5 (dp5·cp0·tp0·pp0)",), waited_s=7.0)
    with ScriptedServer(endpoint, saying(wait)), feed_from(endpoint, start_timeout=1.0) as feed:
        with pytest.raises(StartTimeout, match=r"the server waits for readers: rank 5 \(dp5·cp0·tp0·pp0\) \(for 7 s\)"):
            next(feed)
        assert feed.stats().waits.keys() <= {"the server", "readers", "the next micro-batch"}
        assert feed.stats().waits["readers"] > 0


def test_a_stream_that_stops_has_another_deadline(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(WELCOME, batch(0, 0))), feed_from(endpoint, stall_timeout=SOON_S) as feed:
        assert next(feed).position == ORIGIN
        with pytest.raises(StallTimeout, match=rf"waited {SOON_S:g} s \(stall_timeout\) at .*step=0, index=1"):
            next(feed)


def test_a_deadline_counts_only_while_the_loop_asks(endpoint: str) -> None:
    """Each time the loop asks, all of it is there again."""
    with feed_from(endpoint, start_timeout=SOON_S) as feed:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(StartTimeout):
                next(feed)
            assert time.monotonic() - began >= SOON_S


def test_a_deadline_that_passed_can_be_followed_by_another_try(endpoint: str) -> None:
    with feed_from(endpoint, start_timeout=SOON_S) as feed:
        with pytest.raises(StartTimeout):
            next(feed)
        with ScriptedServer(endpoint, saying(*TWO_STEPS)):
            wait_until(lambda: feed_has(feed), "a micro-batch")


def feed_has(feed: Feed) -> bool:
    try:
        return next(feed) is not None
    except StartTimeout:
        return False


# What is handed out ---------------------------------------------------------------------------------


def test_a_stream_is_handed_out_in_order_and_ends(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)) as server:
        with feed_from(endpoint) as feed:
            taken = list(feed)
            assert list(feed) == [], "the end stays the end"
        wait_until(lambda: bool(server.heard_of(Bye)), "BYE")
    assert [micro_batch.position for micro_batch in taken] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(micro_batch.computed_digest() == micro_batch.row_digest for micro_batch in taken)
    assert all(micro_batch.tokens.tolist() == SLOTS.tokens for micro_batch in taken)
    assert server.heard_of(Bye) == [Bye(stream="train")]
    acknowledged = [ack.position for ack in server.heard_of(Ack)]
    assert acknowledged == sorted(acknowledged)
    assert acknowledged[-1] == Position(3, 0), "the end is acknowledged as a step of one"


def taking(feed: Feed, count: int, server: ScriptedServer) -> list[Position]:
    """What was acknowledged in between, once the last is."""
    before = len(server.heard_of(Ack))
    for _ in range(count):
        last = next(feed).position.after(LONG_STEP)
    wait_until(lambda: server.heard_of(Ack)[-1].position == last, f"the ACK of {last}")
    return [ack.position for ack in server.heard_of(Ack)[before:]]


LONG_STEP = 10  # micro-batches
IN_LONG_STEPS = replace(WELCOME, keep_alive_s=600.0, contract=replace(CONTRACT, global_batch_size=LONG_STEP))
A_LONG_STEP: tuple[Reply, ...] = (IN_LONG_STEPS, *(batch(0, index) for index in range(LONG_STEP)))


def test_half_a_window_and_a_step_are_acknowledged_and_do_not_wait_for_the_next_keep_alive(endpoint: str) -> None:
    """Between them nothing is: the server waits for nothing less."""
    with ScriptedServer(endpoint, saying(*A_LONG_STEP)) as server, feed_from(endpoint, window=8) as feed:
        wait_until(lambda: bool(server.heard_of(Ack)), "the ACK of WELCOME")
        assert taking(feed, 4, server) == [(0, 4)]
        assert taking(feed, 4, server) == [(0, 8)]
        assert taking(feed, 2, server) == [(1, 0)]


def test_a_chunk_that_waits_far_ahead_has_the_server_know_what_was_taken(endpoint: str) -> None:
    """A window of no more than it needs has no room for what is taken and not acknowledged."""
    later = {Position(0, 1): batch(0, 5)}

    def script(message: Message) -> Sequence[Reply]:
        if isinstance(message, Hello):
            return [IN_LONG_STEPS, *(batch(0, index) for index in range(5))]
        return [later.pop(message.position)] if isinstance(message, Ack) and message.position in later else ()

    with ScriptedServer(endpoint, script), feed_from(endpoint, window=5) as feed:
        first, last = feed.chunks(2)
        taken = [next(first).index for _ in range(5)]
        assert next(last).index == 0
        assert [*taken, next(first).index] == [*range(6)]


def upcoming(feed: Feed) -> list[bool]:
    """Whether each micro-batch that is ready is rebuilt."""
    return [isinstance(entry, MicroBatch) for entry in feed._connection.queue.entries]


def test_what_a_loop_does_not_ask_for_is_rebuilt_for_it(endpoint: str) -> None:
    """At the beginning, and while it is away; without a message or a keep-alive in between."""
    with ScriptedServer(endpoint, saying(*A_LONG_STEP)), feed_from(endpoint) as feed:
        wait_until(lambda: upcoming(feed) == [True] * LONG_STEP, "all of them")


def test_a_loop_that_asks_again_at_once_reads_rebuilds_and_acknowledges_by_itself(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_activity, "AWAY_S", 600.0)  # the thread never does
    with ScriptedServer(endpoint, saying(*A_LONG_STEP)) as server, feed_from(endpoint, window=8) as feed:
        taken = [next(feed) for _ in range(5)]
        assert not any(upcoming(feed))
        assert all(micro_batch.computed_digest() == micro_batch.row_digest for micro_batch in taken)
        wait_until(lambda: Position(0, 4) in [ack.position for ack in server.heard_of(Ack)], "the ACK of half a window")


def test_a_loop_that_was_interrupted_while_it_read_goes_on_where_it_stood(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had begun to read is lost: the server sends it again on another connection."""
    monkeypatch.setattr(loop_activity, "AWAY_S", 600.0)
    read = SocketWorker._read
    losses = iter(range(3))

    def interrupted(self: SocketWorker) -> None:
        if next(losses, None) is None:
            return read(self)
        next(self.dealer.messages())
        raise KeyboardInterrupt

    monkeypatch.setattr(SocketWorker, "_read", interrupted)
    with ScriptedServer(endpoint, saying(*TWO_STEPS)), feed_from(endpoint) as feed:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                next(feed)
        assert [micro_batch.position for micro_batch in feed] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_hello_says_what_this_reader_declares(endpoint: str) -> None:
    declared = BatchContract(seq_length=8)
    options: dict[str, Any] = {
        "contract": declared,
        "layout": ParallelLayout(data=2),
        "rank": 1,
        "window": 7,
        "start_timeout": 31,
    }
    with ScriptedServer(endpoint, saying()) as server:
        with feed_from(endpoint, stream="validation", **options) as feed:
            wait_until(lambda: bool(server.heard), "HELLO")
        (hello,) = server.heard_of(Hello)
    assert (hello.stream, hello.reader, hello.window) == ("validation", feed.coordinates, 7)
    assert hello.start_timeout_s == 31.0, "it waits for the others as long as the start may take"
    assert (hello.contract, hello.layout, hello.attempt, hello.position) == (
        declared,
        ParallelLayout(data=2),
        b"",
        ORIGIN,
    )


def test_what_the_server_warns_of_can_be_read(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)), feed_from(endpoint) as feed:
        next(feed)
        assert feed.warnings == WELCOME.warnings != ()


def test_whole_steps_are_handed_out_as_tuples(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)), feed_from(endpoint) as feed:
        assert [[mb.position for mb in step] for step in feed.steps()] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_tensors_or_arrays_are_delivered_as_asked(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)):
        with feed_from(endpoint) as feed:
            assert isinstance(next(feed).tokens, np.ndarray)
        with feed_from(endpoint, arrays="torch") as feed:
            micro_batch = next(feed)
    assert isinstance(micro_batch.tokens, torch.Tensor)
    assert (micro_batch.loss_mask.dtype, micro_batch.cu_seqlens.dtype) == (torch.float32, torch.int32)
    assert micro_batch.computed_digest() == micro_batch.row_digest


def test_stats_count_what_was_taken_and_waited_for(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)), feed_from(endpoint) as feed:
        assert feed.stats().micro_batches == 0
        assert feed.stats().wait_seconds == 0
        for count, _ in enumerate(feed, start=1):
            assert feed.stats().micro_batches == count
        assert feed.stats().wait_seconds == sum(feed.stats().waits.values())


def test_stats_tell_how_long_nobody_answered(endpoint: str) -> None:
    with feed_from(endpoint, start_timeout=0.05) as feed:
        with pytest.raises(StartTimeout):
            next(feed)
        assert feed.stats().wait_seconds == sum(feed.stats().waits.values()) >= 0.04


# Errors ---------------------------------------------------------------------------------------------


def test_a_refusal_is_raised_with_every_violation(endpoint: str) -> None:
    reject = EXAMPLES["REJECT"]
    assert isinstance(reject, Reject)
    with ScriptedServer(endpoint, saying(reject)), feed_from(endpoint) as feed:
        for _ in range(2):
            with pytest.raises(HandshakeRefused) as refused:
                next(feed)
            assert refused.value.violations == reject.violations


def test_a_fatal_error_of_the_server_is_raised_behind_what_is_ready(endpoint: str) -> None:
    failed = ServerError(stream="train", code=ErrorCode.FAILED, message="shard 'a.tar' is gone", fatal=True)
    with ScriptedServer(endpoint, saying(WELCOME, batch(0, 0), failed)), feed_from(endpoint) as feed:
        taken: list[MicroBatch] = []
        with pytest.raises(ServerFailed, match=r"shard 'a\.tar' is gone"):
            taken.extend(feed)
        assert [micro_batch.position for micro_batch in taken] == [ORIGIN]
        with pytest.raises(ServerFailed):
            next(feed)


BAD_BATCH = [encode(batch(0, 0)), b"no such payload"]
ZERO_DIVISION = encode(WELCOME).replace(b"micro_batch_size\x01", b"micro_batch_size\x00")


@pytest.mark.parametrize(
    "replies",
    [
        pytest.param([[b"\xc1"]], id="no msgpack"),
        pytest.param([batch(0, 0), Bye(stream="train")], id="what only a client says"),
        pytest.param([WELCOME, BAD_BATCH], id="a payload that does not fit its table"),
        pytest.param([[ZERO_DIVISION], batch(0, 0)], id="a contract that divides by zero"),
        pytest.param([WELCOME, [encode(batch(0, 0))]], id="a frame that is missing"),
    ],
)
def test_what_the_protocol_does_not_allow_is_raised_in_the_loop_at_once(endpoint: str, replies: list[Reply]) -> None:
    with ScriptedServer(endpoint, saying(*replies)), feed_from(endpoint, start_timeout=5, stall_timeout=5) as feed:
        for _ in range(2):
            with pytest.raises(ProtocolError):
                next(feed)


def test_what_was_ready_before_an_error_is_handed_out_and_closing_stays_possible(endpoint: str) -> None:
    """The thread has ended by then: neither taking nor closing may trip over its closed socket."""
    with ScriptedServer(endpoint, saying(WELCOME, batch(0, 0), batch(0, 1), [b"\xc1"])):
        feed = feed_from(endpoint)
        wait_until(lambda: not any(t.name.startswith("packhorse-feed") for t in threading.enumerate()), "the error")
        assert [next(feed).position, next(feed).position] == [(0, 0), (0, 1)]
        with pytest.raises(ProtocolError):
            next(feed)
        feed.close()


@pytest.mark.parametrize("away_s", [0.0, 600.0], ids=["found by the thread", "found by the loop"])
def test_a_payload_that_does_not_fit_is_raised_in_its_place_and_ends_the_thread(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    monkeypatch.setattr(loop_activity, "AWAY_S", away_s)
    bad = [encode(batch(0, 1)), b"no such payload"]
    with ScriptedServer(endpoint, saying(WELCOME, batch(0, 0), bad, batch(1, 0))), feed_from(endpoint) as feed:
        assert next(feed).position == ORIGIN
        for _ in range(2):
            with pytest.raises(ProtocolError, match="payload"):
                next(feed)
            assert feed.position == (0, 1)
        wait_until(lambda: not feed._thread.is_alive(), "the end of the thread")


@pytest.mark.parametrize("away_s", [0.0, 600.0], ids=["found by the thread", "found by the loop"])
def test_whatever_fails_while_a_micro_batch_is_rebuilt_is_raised_in_the_loop(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, away_s: float
) -> None:
    def fails(*_: object) -> MicroBatch:
        raise MemoryError("no room")

    monkeypatch.setattr(loop_activity, "AWAY_S", away_s)
    monkeypatch.setattr(Rebuilder, "rebuild", fails)
    with ScriptedServer(endpoint, saying(WELCOME, batch(0, 0))), feed_from(endpoint) as feed:
        with pytest.raises(TransportError, match="the feed failed: MemoryError: no room"):
            next(feed)
        wait_until(lambda: not feed._thread.is_alive(), "the end of the thread")


# Leaving --------------------------------------------------------------------------------------------


def test_close_ends_the_thread_and_may_be_called_twice(endpoint: str) -> None:
    feed = feed_from(endpoint)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("packhorse-feed-0") == 1
    began = time.monotonic()
    feed.close()
    assert "packhorse-feed-0" not in [thread.name for thread in threading.enumerate()]
    assert time.monotonic() - began < 4
    feed.close()


@pytest.mark.parametrize("how", ["close", "with"])
def test_leaving_before_the_end_says_bye_unfinished(endpoint: str, how: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)) as server:
        feed = feed_from(endpoint)
        next(feed)
        if how == "close":
            feed.close()
        else:
            with feed:
                pass
        wait_until(lambda: bool(server.heard_of(Bye)), "BYE")
    assert server.heard_of(Bye) == [Bye(stream="train")]


class LoopFailed(Exception):
    """Something in the training loop."""


def test_a_loop_that_fails_says_no_bye_so_that_its_next_attempt_finds_the_stream(endpoint: str) -> None:
    def train() -> None:
        with feed_from(endpoint) as feed:
            next(feed)
            raise LoopFailed

    with ScriptedServer(endpoint, saying(*TWO_STEPS)) as server:
        with pytest.raises(LoopFailed):
            train()
        with feed_from(endpoint) as feed:
            next(feed)
        wait_until(lambda: bool(server.heard_of(Bye)), "the second feed's BYE")
        assert len(server.heard_of(Bye)) == 1


def test_a_feed_that_is_dropped_ends_its_thread(endpoint: str) -> None:
    feed = feed_from(endpoint)
    del feed
    gc.collect()
    assert "packhorse-feed-0" not in [thread.name for thread in threading.enumerate()]


def test_a_closed_feed_says_so_instead_of_waiting(endpoint: str) -> None:
    feed = feed_from(endpoint, start_timeout=3.0)
    feed.close()
    began = time.monotonic()
    with pytest.raises(PackhorseError, match=r"\bclosed\b"):
        next(feed)
    assert time.monotonic() - began < 1


# Processes ------------------------------------------------------------------------------------------


def run_script(script: str, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
import os, sys
from packhorse import Feed, PackhorseError
feed = Feed(sys.argv[1], arrays="numpy", start_timeout=0.2)
child = os.fork()
if child == 0:
    try:
        next(feed)
    except PackhorseError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
try:
    next(feed)
except PackhorseError as error:
    print(type(error).__name__, flush=True)
feed.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_use_its_parents_feed_and_does_not_break_it(endpoint: str) -> None:
    of_child, of_parent = run_script(FORK, endpoint).splitlines()
    assert of_child.startswith("PackhorseError a Feed cannot be used in a forked process")
    assert of_parent == "StartTimeout"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it now fails
from packhorse import ConfigError, Feed
try:
    Feed(sys.argv[1])
except ConfigError as error:
    print(error)
with Feed(sys.argv[1], arrays="numpy", start_timeout=30, stall_timeout=30) as feed:
    taken = list(feed)
print(len(taken), taken[0].tokens.dtype, taken[0].masked_labels().tolist())
"""


def test_numpy_arrays_need_no_torch(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)):
        refusal, taken = run_script(WITHOUT_TORCH, endpoint).splitlines()
    assert "pip install 'packhorse[torch]'" in refusal
    masked = [label if trained else -100 for label, trained in zip(SLOTS.labels, SLOTS.mask, strict=True)]
    assert taken == f"4 int64 {masked}"


NEVER_CLOSED = """
import sys
from packhorse import Feed
feed = Feed(sys.argv[1], arrays="numpy", start_timeout=30, stall_timeout=30)
print(len(list(feed)))
"""


def test_a_finished_reader_says_bye_even_where_nobody_closes_it(endpoint: str) -> None:
    with ScriptedServer(endpoint, saying(*TWO_STEPS)) as server:
        assert run_script(NEVER_CLOSED, endpoint) == "4\n"
        wait_until(lambda: bool(server.heard_of(Bye)), "BYE")
    assert server.heard_of(Bye) == [Bye(stream="train")]
