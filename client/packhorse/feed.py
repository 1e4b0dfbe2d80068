"""The iterator of one rank, and the client's only socket, clock and thread.

The thread owns the DEALER socket. It always reads: only the delivery window bounds what is ready. It
rebuilds micro-batches, into pinned memory where there is CUDA, while the loop trains. The loop takes
what is ready; each take is acknowledged, several at once where the loop is fast.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from packhorse.arrays import Arrays, finisher
from packhorse.chunks import Chunk, Chunks
from packhorse.contract import BatchContract
from packhorse.dealer import ConnectionEvent, Dealer
from packhorse.environment import find_place
from packhorse.errors import ConfigError, PackhorseError, ProtocolError, StallTimeout, StartTimeout, TransportError
from packhorse.handover import Handover
from packhorse.layout import ParallelLayout
from packhorse.microbatch import MicroBatch, Position
from packhorse.rules import Violation
from packhorse.session import ClientSession, Deliver, Effect, Fail, Finish, Forget, Identity, Reconnect, Send, State
from packhorse.state import FeedState
from packhorse.stats import FeedStats
from packhorse.views import view_microbatch
from packhorse.wire import decode, encode

__all__ = ["Feed", "FeedStats"]

KEEP_ALIVE_S = 1.0
END_WAIT_S = 30.0  # how long a reader that has ended stays until all others have


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
        self.layout = layout
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
            patience_s=float(start_timeout),
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
        micro_batch = self._look()
        if micro_batch is None:
            raise StopIteration
        return micro_batch

    def steps(self) -> Iterator[tuple[MicroBatch, ...]]:
        """Whole steps: the ``num_microbatches`` micro-batches of this rank, in order."""
        step: list[MicroBatch] = []
        for micro_batch in self:
            step.append(micro_batch)
            if micro_batch.index == micro_batch.num_microbatches - 1:
                yield tuple(step)
                step = []

    def chunks(self, count: int) -> tuple[Chunk, ...]:
        """Iterators for the ``count`` model chunks of a virtual pipeline, over this one session.

        Each yields every micro-batch at its own pace; one is taken when the slowest has taken it. The
        window must reach from the fastest to the slowest: a group of micro-batches and one more.
        """
        chunks = Chunks(count, self._look)
        return tuple(Chunk(chunks, number) for number in range(count))

    def verify_peers(self, group: Any = None) -> None:
        """Check over a ``torch.distributed`` group that its ranks took the same micro-batch last; collective.

        Raises ``ContractError`` on every rank where they did not, naming who holds what.
        """
        from packhorse.peers import verify_same  # torch is an extra

        verify_same(self.position, self._connection.session.last_digest, group)

    @property
    def position(self) -> Position:
        """(step, index) of the next micro-batch; one step further once the end was taken."""
        return self._connection.session.position

    @property
    def attempt(self) -> str:
        """Name of the attempt that this reader is part of, in hexadecimal; empty until one has formed."""
        return self._connection.session.attempt.hex()

    def state_dict(self, step: int | None = None) -> dict[str, object]:
        """What to put in a checkpoint: where the loop stands, strings and integers only.

        It counts what the loop has taken, never what was fetched ahead. A loop that has taken micro-batches
        of a step it has not trained passes ``step``, the number of steps trained: it gets the boundary
        before that step, of which the last two are held. Equal on all ranks at a step boundary.

        Raises ``ContractError`` where that boundary is not held.
        """
        with self._connection.changed:
            return self._connection.session.saved(step).to_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state`` was saved, from any server of the same data; on all ranks, before iterating.

        Inside a step only the same layout and batch sizes go on; a boundary resumes on others too.

        Raises ``ContractError`` that names what is wrong with the state, or that it comes too late.
        """
        saved = FeedState.from_dict(state, self._connection.session.identity.stream)
        with self._connection.changed:
            self._connection.handover.resume(saved)
        self._connection.ring()

    def stats(self) -> FeedStats:
        """What this rank has taken and waited for so far."""
        waits = dict(self._waits)
        return FeedStats(micro_batches=self._taken, wait_seconds=sum(waits.values()), waits=waits)

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """What the server warned of at the handshake: rules whose break it reports and serves nevertheless."""
        return self._connection.session.warnings

    def close(self) -> None:
        """Say BYE and stop the thread.

        At the end of the stream it first waits, half a minute at most, until all other readers have ended or left:
        a server that takes another's place needs every reader to tell any of them the end.
        """
        self._connection.leaving = True
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A crash is no orderly leave: the server keeps the stream for the job's next attempt.
        self._connection.leaving = kind is None
        self._finalizer()

    def _look(self, ahead: int = 0, take: bool = True) -> MicroBatch | None:
        """The micro-batch ``ahead`` of the next, taken if that is the next; ``None`` behind the end.

        Blocks until it is there, the stream has ended, or a deadline has passed.
        """
        if os.getpid() != self._pid:
            raise PackhorseError("a Feed cannot be used in a forked process; create it where it is iterated")
        if not self._finalizer.alive:
            raise PackhorseError("this Feed is closed; create another to go on")
        connection = self._connection
        began = mark = time.monotonic()
        with connection.changed:
            connection.asking_since = began
            try:
                while not connection.handover.settled(ahead):
                    connection.changed.wait(min(1.0, self._remaining(began)))
                    now = time.monotonic()
                    self._waits[connection.handover.waiting_for()] += now - mark
                    mark = now
                if not take:
                    return connection.handover.peek(ahead)
                micro_batch = connection.handover.take()
                self._taken += micro_batch is not None
                connection.ring()  # to acknowledge it
                return micro_batch
            finally:
                connection.asking_since = None
                connection.last_asked = time.monotonic()

    def _remaining(self, began: float) -> float:
        session = self._connection.session
        starting = session.state in (State.IDLE, State.GREETING) and not session.attempt
        limit, error = (self._start_timeout, StartTimeout) if starting else (self._stall_timeout, StallTimeout)
        remaining = began + limit - time.monotonic()
        if remaining <= 0:
            name = "start_timeout" if starting else "stall_timeout"
            raise error(
                f"rank {self.rank} ({self.coordinates}) waited {limit:g} s ({name}) at {session.position} for "
                f"{self.endpoint}: {self._connection.handover.describe()}"
            )
        return remaining


def _shut(connection: _Connection, thread: threading.Thread) -> None:
    connection.stop()
    thread.join(timeout=END_WAIT_S + 5)


class _Connection:
    """The socket's owner thread and what it shares with the loop, under one condition."""

    def __init__(self, endpoint: str, session: ClientSession, arrays: Arrays) -> None:
        self.endpoint = endpoint
        self.session = session
        self.changed = threading.Condition()
        self.handover = Handover(session)
        self.asking_since: float | None = None
        self.last_asked = time.monotonic()
        self.leaving = False
        self._stopping = False
        self._leave_by = 0.0
        self._finish = finisher(arrays)
        self._dealer = Dealer(endpoint)

    def stop(self) -> None:
        self._leave_by = time.monotonic() + END_WAIT_S
        self._stopping = True
        self.ring()

    @property
    def _needed(self) -> bool:
        """Whether the others may still need this reader, which has ended: a new server meets all or none."""
        waits = self.session.state is State.ENDED and not self.session.released
        return waits and time.monotonic() < self._leave_by

    def ring(self) -> None:
        """Wake the thread: there is something to say."""
        self._dealer.ring()

    # The thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the socket until asked to stop; an error ends up in the loop."""
        try:
            self._work()
        except PackhorseError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the loop must hear that nothing will come
            self._fail(TransportError(f"{self.endpoint}: the feed failed: {type(error).__name__}: {error}"))
        finally:
            self._close()

    def _work(self) -> None:
        next_keep_alive = 0.0
        while not self._stopping or self._needed:
            rung = self._dealer.wait(KEEP_ALIVE_S)
            self._watch()
            self._read()
            if rung:
                self._say_unsaid()
            now = time.monotonic()
            if rung or now >= next_keep_alive:
                self._acknowledge(now)
                next_keep_alive = now + KEEP_ALIVE_S

    def _watch(self) -> None:
        """Follow the connection: a new one says HELLO."""
        for event in self._dealer.events():
            self.handover.connected = event is ConnectionEvent.UP
            if event is ConnectionEvent.UP:
                self._carry_out(self._locked(self.session.connected))
            else:
                self.handover.last_failure = "the connection was closed"

    def _read(self) -> None:
        for frames in self._dealer.messages():
            message, extra = decode(frames)
            self._carry_out(self._locked(partial(self.session.receive, message, extra)))

    def _locked(self, transition: Callable[[], list[Effect]]) -> list[Effect]:
        """One transition of the session; what it forgets, the loop must not take meanwhile."""
        with self.changed:
            effects = transition()
            if any(isinstance(effect, Forget) for effect in effects):
                self.handover.forget()
            return effects

    def _close(self) -> None:
        if self.leaving or self.session.state is State.ENDED:
            self._dealer.linger()
            if self.handover.connected:
                self._acknowledge(time.monotonic())  # the loop may have taken the last one just now
                self._send(Send(self.session.bye()))
        self._dealer.close()

    def _say_unsaid(self) -> None:
        effects = self._locked(lambda: self.handover.unsaid)
        self._carry_out(effects)
        with self.changed:
            self.handover.said(effects)
            self.changed.notify_all()

    def _acknowledge(self, now: float) -> None:
        with self.changed:
            if not self.handover.connected or self.session.state not in (State.STREAMING, State.ENDED):
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
                    pass  # done already, together with the transition
                case Finish():
                    with self.changed:
                        self.handover.finished = True
                        self.changed.notify_all()
                case Reconnect():
                    self.handover.connected = False
                    self._dealer.reconnect()
                case Fail(error):
                    self._fail(error)

    def _send(self, effect: Send) -> None:
        if not self._dealer.send([encode(effect.message), *effect.extra]):
            # The connection went down meanwhile: the next one begins with HELLO, which says it all again.
            self.handover.connected = False

    def _deliver(self, effect: Deliver) -> None:
        identity, contract = self.session.identity, self.session.contract
        if contract is None:
            raise ProtocolError("BATCH before WELCOME")
        payload = memoryview(effect.payload)
        rebuilt = view_microbatch(effect.body, payload, contract, identity.layout, identity.reader.context)
        micro_batch = self._finish(rebuilt)
        with self.changed:
            self.handover.ready.append(micro_batch)
            self.changed.notify_all()

    def _fail(self, error: PackhorseError) -> None:
        with self.changed:
            self.handover.fail(error)
            self.changed.notify_all()
