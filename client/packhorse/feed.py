"""The iterator of one rank, and the client's only socket, clock and thread.

The thread owns the DEALER socket. It always reads: only the delivery window bounds what is ready. It
rebuilds micro-batches, into pinned memory where there is CUDA, while the loop trains. The loop takes
what is ready; each take is acknowledged, several at once where the loop is fast.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from packhorse.arrays import Arrays, finisher
from packhorse.contract import BatchContract
from packhorse.environment import find_place
from packhorse.errors import ConfigError, PackhorseError, ProtocolError, StallTimeout, StartTimeout, TransportError
from packhorse.layout import ParallelLayout
from packhorse.microbatch import MicroBatch
from packhorse.session import ClientSession, Deliver, Effect, Fail, Finish, Forget, Identity, Reconnect, Send, State
from packhorse.stats import FeedStats
from packhorse.views import view_microbatch
from packhorse.wire import decode, encode

__all__ = ["Feed", "FeedStats"]

KEEP_ALIVE_S = 1.0
RECONNECT_MS = (100, 5_000)
HANDSHAKE_MS = 5_000
LEAVE_MS = 500  # how long a BYE may take to leave the socket
HEARTBEAT_MS = 2_000

FATAL_EVENTS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server refused this client's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the server speaks another security mechanism (CURVE on one side only?)",
}


class Feed(Iterator[MicroBatch]):
    """Iterate the micro-batches of one rank.

    ``endpoint``: ``tcp://host:port`` or ``ipc://path`` of a running ``packhorse serve``. ``contract`` and
    ``layout`` are what this trainer relies on: the server refuses a job that differs. ``rank`` comes from
    the argument, torch.distributed, torchrun or Slurm, in that order.

    ``window``: micro-batches the server may send ahead of the loop. ``start_timeout`` bounds the wait for
    all readers to meet, ``stall_timeout`` the wait for one micro-batch, both in seconds and only while the
    loop is asking; they stay below the 600 s after which NCCL gives up. ``arrays``: ``"torch"`` (int64,
    float32 and int32 tensors) or ``"numpy"``.

    Raises ``HandshakeRefused``, ``StartTimeout``, ``StallTimeout``, ``ServerFailed`` from the iteration.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        contract: BatchContract | None = None,
        layout: ParallelLayout | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        stream: str = "train",
        window: int = 4,
        start_timeout: float = 540.0,
        stall_timeout: float = 540.0,
        arrays: Arrays = "torch",
    ) -> None:
        layout = layout or ParallelLayout()
        place = find_place(layout, rank, world_size)
        if place.world_size != layout.world_size:
            raise ConfigError(
                f"world size {place.world_size} (from {place.told_by}) must equal the layout {layout} of "
                f"{layout.world_size} ranks; pass the layout of this job"
            )
        self.endpoint = endpoint
        self.rank = place.rank
        self.coordinates = layout.coordinates(place.rank)
        self._start_timeout, self._stall_timeout = start_timeout, stall_timeout
        identity = Identity(
            stream=stream,
            reader=self.coordinates,
            client=secrets.token_bytes(16),
            layout=layout,
            contract=contract or BatchContract(),
            window=window,
        )
        self._pid = os.getpid()
        self._connection = _Connection(endpoint, ClientSession(identity), arrays)
        self._thread = threading.Thread(target=self._connection.run, name=f"packhorse-feed-{place.rank}", daemon=True)
        # Also at interpreter exit: a finished reader then says BYE even when nobody called close().
        self._finalizer = weakref.finalize(self, _shut, self._connection, self._thread)
        self._taken = 0
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        """The next micro-batch; ends when the stream does."""
        if os.getpid() != self._pid:
            raise PackhorseError("a Feed cannot be used in a forked process; create it where it is iterated")
        micro_batch = self._wait()
        if micro_batch is None:
            raise StopIteration
        self._taken += 1
        return micro_batch

    def steps(self) -> Iterator[tuple[MicroBatch, ...]]:
        """Whole steps: the ``num_microbatches`` micro-batches of this rank, in order."""
        step: list[MicroBatch] = []
        for micro_batch in self:
            step.append(micro_batch)
            if micro_batch.index == micro_batch.num_microbatches - 1:
                yield tuple(step)
                step = []

    def stats(self) -> FeedStats:
        """What this rank has taken and waited for so far."""
        waits = dict(self._waits)
        return FeedStats(micro_batches=self._taken, wait_seconds=sum(waits.values()), waits=waits)

    def close(self) -> None:
        """Say BYE and stop the thread."""
        self._connection.leaving = True
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A crash is no orderly leave: the server keeps the stream for the job's next attempt.
        self._connection.leaving = kind is None
        self._finalizer()

    def _wait(self) -> MicroBatch | None:
        """Block until something is ready, the stream has ended, or a deadline has passed."""
        connection = self._connection
        began = mark = time.monotonic()
        with connection.changed:
            connection.asking_since = began
            try:
                while not connection.settled():
                    connection.changed.wait(min(1.0, self._remaining(began)))
                    now = time.monotonic()
                    self._waits[connection.waiting_for()] += now - mark
                    mark = now
                return connection.take()
            finally:
                connection.asking_since = None
                connection.last_asked = time.monotonic()

    def _remaining(self, began: float) -> float:
        session = self._connection.session
        starting = session.state in (State.IDLE, State.GREETING) and not session.attempt
        limit, error = (self._start_timeout, StartTimeout) if starting else (self._stall_timeout, StallTimeout)
        name = "start_timeout" if starting else "stall_timeout"
        remaining = began + limit - time.monotonic()
        if remaining <= 0:
            raise error(
                f"rank {self.rank} ({self.coordinates}) waited {limit:g} s ({name}) at {session.position} for "
                f"{self.endpoint}: {self._connection.describe()}"
            )
        return remaining


def _shut(connection: _Connection, thread: threading.Thread) -> None:
    connection.stop()
    thread.join(timeout=5)


class _Connection:
    """The socket's owner thread and what it shares with the loop, under one condition."""

    def __init__(self, endpoint: str, session: ClientSession, arrays: Arrays) -> None:
        self.endpoint = endpoint
        self.session = session
        self.changed = threading.Condition()
        self.ready: deque[MicroBatch] = deque()
        self.finished = False  # END stands behind what is ready
        self.error: PackhorseError | None = None
        self.asking_since: float | None = None
        self.last_asked = time.monotonic()
        self.leaving = False
        self._connected = False
        self._stopping = False
        self._last_failure = "nobody has answered there yet"
        self._finish = finisher(arrays)
        self._bell, self._ear = socket.socketpair()  # wakes the thread from the loop
        self._bell.setblocking(False)
        self._context = zmq.Context()
        self._open()

    # Called by the loop, holding ``changed`` ---------------------------------------------------------

    def settled(self) -> bool:
        return bool(self.ready) or self.finished or self.error is not None

    def take(self) -> MicroBatch | None:
        if self.ready:
            micro_batch = self.ready.popleft()
            self.session.handed_out(micro_batch.position, micro_batch.row_digest)
            self._ring()
            return micro_batch
        if self.error is not None:
            raise self.error
        if self.session.state is not State.ENDED:
            self.session.end_handed_out()
            self._ring()
        return None

    def waiting_for(self) -> str:
        waiting = self.session.waiting
        if not self._connected:
            return "the server"
        return waiting.reason.value if waiting is not None else "the next micro-batch"

    def describe(self) -> str:
        """What this reader is waiting for, for a person."""
        waiting = self.session.waiting
        if not self._connected:
            return f"no connection ({self._last_failure}); is the server running, and is this its endpoint?"
        if waiting is None:
            return "connected, and the server has not said what it waits for"
        whom = f": {', '.join(waiting.whom)}" if waiting.whom else ""
        return f"the server waits for {waiting.reason}{whom} (for {waiting.since_s:.0f} s)"

    def stop(self) -> None:
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        # Enough rings are waiting to be heard, or the thread has ended.
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    # The thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the socket until asked to stop; an error ends up in the loop."""
        try:
            self._work()
        except (PackhorseError, zmq.ZMQError) as error:
            self._fail(error if isinstance(error, PackhorseError) else TransportError(f"{self.endpoint}: {error}"))
        finally:
            self._close()

    def _work(self) -> None:
        next_keep_alive = 0.0
        while not self._stopping:
            events = dict(self._poller.poll(int(KEEP_ALIVE_S * 1000)))
            if self._monitor in events:
                self._watch()
            if self._socket in events:
                self._read()
            now = time.monotonic()
            if self._ear.fileno() in events:
                self._ear.recv(4096)
                next_keep_alive = now
            if now >= next_keep_alive:
                self._acknowledge(now)
                next_keep_alive = now + KEEP_ALIVE_S

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.IPV6: 1,
            zmq.RCVHWM: 0,  # the window bounds what is in flight
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: 3 * HEARTBEAT_MS,
        }.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket()
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._close()
            raise ConfigError(
                f"endpoint={self.endpoint!r} cannot be used ({error}); give tcp://host:port or ipc://path"
            ) from error
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._ear.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _close(self) -> None:
        if self.leaving or self.session.state is State.ENDED:
            self._socket.setsockopt(zmq.LINGER, LEAVE_MS)
            if self._connected:
                self._send(Send(self.session.bye()))
        self._close_socket()
        self._context.term()
        self._bell.close()
        self._ear.close()

    def _watch(self) -> None:
        """Follow the socket's monitor: a new connection says HELLO, a refused key is an error."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind = event["event"]
            if kind in FATAL_EVENTS:
                self._fail(TransportError(f"{self.endpoint}: {FATAL_EVENTS[kind]}"))
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                with self.changed:
                    effects = self.session.connected()
                self._carry_out(effects)
            elif kind == zmq.EVENT_DISCONNECTED:
                self._last_failure = "the connection was closed"
                self._connected = False

    def _read(self) -> None:
        while self._socket.poll(0):
            frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            message, extra = decode(frames)
            with self.changed:
                effects = self.session.receive(message, extra)
            self._carry_out(effects)

    def _acknowledge(self, now: float) -> None:
        with self.changed:
            if not self._connected or self.session.state not in (State.STREAMING, State.ENDED):
                return
            idle = 0.0 if self.asking_since is not None else now - self.last_asked
            ack = self.session.ack(idle)
        self._send(Send(ack))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Deliver():
                    self._deliver(effect)
                case Forget():
                    with self.changed:
                        self.ready.clear()
                        self.finished = False
                case Finish():
                    with self.changed:
                        self.finished = True
                        self.changed.notify_all()
                case Reconnect():
                    self._close_socket()
                    self._connected = False
                    self._open()
                case Fail(error):
                    self._fail(error)

    def _send(self, effect: Send) -> None:
        try:
            self._socket.send_multipart([encode(effect.message), *effect.extra], flags=zmq.NOBLOCK)
        except zmq.Again:
            # The connection went down meanwhile: the next one begins with HELLO, which says it all again.
            self._connected = False

    def _deliver(self, effect: Deliver) -> None:
        identity, contract = self.session.identity, self.session.contract
        if contract is None:
            raise ProtocolError("BATCH before WELCOME")
        payload = memoryview(effect.payload)
        rebuilt = view_microbatch(effect.body, payload, contract, identity.layout, identity.reader.context)
        micro_batch = self._finish(rebuilt)
        with self.changed:
            self.ready.append(micro_batch)
            self.changed.notify_all()

    def _fail(self, error: PackhorseError) -> None:
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()
