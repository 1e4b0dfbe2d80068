"""The client's only socket and who works it, and what its thread and the loop share under one lock.

One of the two owns the socket at a time. A loop that asks, and asks again soon, reads and acknowledges itself, and the
thread naps: to wake one thread for the other costs more than that takes. While the loop is away, training, the thread
reads all there is, so only the delivery window bounds what is ready, tells the server that this reader lives, and
rebuilds micro-batches, into pinned memory where there is CUDA. What the loop takes is acknowledged half a window or a
step at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import PackhorseError, TransportError
from packhorse.feeding.array_converter import Arrays, array_converter
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Effect, Fail, Finish, Forget, Reconnect, Send
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.transport.key_files import ClientKey
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.wire.messages import decode, encode

__all__ = ["END_WAIT_S", "Connection"]

AWAY_S = 0.002  # a loop that stays away so long has something to do meanwhile
NAP_S = 0.02  # how often the thread looks whether the loop is away
END_WAIT_S = 30.0  # how long a reader that has ended stays until all others have


class Connection:
    """One stream's, of one rank."""

    def __init__(self, endpoint: str, session: ClientSession, arrays: Arrays, *, key: ClientKey | None = None) -> None:
        self.endpoint = endpoint
        self.session = session
        self.lock = threading.RLock()  # of all that the two share
        self.changed = threading.Condition(self.lock)
        self.queue = ReadyQueue(session)
        self.asking_since: float | None = None
        self.last_asked = time.monotonic()
        self.away_before_s = 0.0  # for so long, before it asked last
        self.leaving = False
        self._stopping = threading.Event()
        self._owned = False  # whether the thread or the loop works the socket just now
        self._flush_requested = self._thread_waits = False
        self._socket_dirty = False  # the loop was interrupted while it worked the socket
        self._said_alive_at = -math.inf
        self._leave_by = 0.0
        self._finish = array_converter(arrays)
        self._dealer = Dealer(endpoint, key=key)

    def stop(self) -> None:
        self._leave_by = time.monotonic() + END_WAIT_S
        self._stopping.set()
        self._dealer.waker.wake()

    @property
    def _awaited_by_others(self) -> bool:
        """Whether the others may still need this reader, which has ended: a new server meets all or none."""
        waits = self.session.state is State.ENDED and not self.session.progress.released
        return waits and time.monotonic() < self._leave_by

    def _as_owner(self, work: Callable[[], None]) -> bool:
        """Work the socket, unless somebody does; whether nobody did."""
        own = False
        try:
            with self.lock:
                if self._owned:
                    return False
                own = self._owned = True
            work()
        finally:
            if own:
                with self.lock:
                    self._owned = False
                    self.changed.notify_all()
        return True

    # The loop ----------------------------------------------------------------------------------------

    def begin_wait(self) -> float:
        """The loop asks from now on; returns when that is."""
        self.asking_since = now = time.monotonic()
        self.away_before_s = now - self.last_asked
        return now

    def end_wait(self) -> None:
        """The loop has its answer."""
        self.last_asked = time.monotonic()
        self.asking_since = None

    def peek_or_take(self, ahead: int, take: bool) -> MicroBatch | None:
        """What is so far ahead, which is settled; taken, if that is the next. Whoever calls holds the lock."""
        found = self.queue.peek(ahead)
        micro_batch = self._rebuilt(ahead, found) if isinstance(found, Deliver) else found
        if take:
            self.queue.take(micro_batch)
            if self.queue.ack_due:
                self.request_flush()
        return micro_batch

    def request_flush(self) -> None:
        """There is something to say. Whoever calls holds the lock, and calls ``flush`` once it is free."""
        self._flush_requested = True
        if self._thread_waits:  # else the thread looks by itself before it sleeps
            self._thread_waits = False
            self._dealer.waker.wake()

    def flush(self) -> None:
        """What the loop has called for, unless the thread is at it."""
        if self._flush_requested and not self._stopping.is_set():
            self._as_owner(partial(self._for_the_loop, self._flush_socket))

    def wait(self, ahead: int, patience_s: float) -> None:
        """Until something has happened that may settle what is so far ahead."""
        poll = partial(self._poll_once, patience_s)
        if self._stopping.is_set() or not self._as_owner(partial(self._for_the_loop, poll)):
            with self.lock:
                if (self._owned or self._stopping.is_set()) and not self.queue.has_answer(ahead):
                    self.changed.wait(patience_s)

    def _for_the_loop(self, work: Callable[[], None]) -> None:
        """What goes wrong ends the thread, and is raised behind what is ready; an interrupt is raised at once."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  whatever it is, it waits its turn
            self._fail(error)
        except BaseException:
            self._socket_dirty = True  # maybe between two frames of a message: begin anew
            raise

    # The thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the socket while the loop does not, until asked to stop; an error ends up in the loop."""
        try:
            self._work()
        except Exception as error:  # noqa: BLE001  whatever it is, the loop must hear that nothing will come
            self._fail(error)
        finally:
            self._close()

    def _work(self) -> None:
        while not self._stopping.is_set() or self._awaited_by_others:
            if self._loop_asks_soon or not self._as_owner(self._poll_in_thread):
                self._stopping.wait(NAP_S)
            else:
                self._rebuild_ahead()

    @property
    def _loop_asks_soon(self) -> bool:
        """Whether it asks, or did a moment ago: it works the socket itself then."""
        return self.asking_since is not None or time.monotonic() - self.last_asked < AWAY_S

    def _poll_in_thread(self) -> None:
        """One turn in the thread, which sleeps unless the loop has called."""
        with self.lock:
            self._thread_waits = not self._flush_requested
            patience_s = self.session.progress.keep_alive_s if self.queue.first_unbuilt is None else AWAY_S
        self._poll_once(patience_s if self._thread_waits else 0.0)

    # The socket's owner ------------------------------------------------------------------------------

    def _poll_once(self, patience_s: float) -> None:
        """Wait until something happens; read it, and say what there is to say."""
        if self._socket_dirty:
            self._reconnect()
        polled = self._dealer.wait(patience_s)
        self._thread_waits = False
        if polled.connections:
            self._watch()
        if polled.messages:
            self._read()
        self._flush_socket()

    def _flush_socket(self) -> None:
        """What was called for; and every keep-alive interval, that this reader lives."""
        with self.lock:
            called, self._flush_requested = self._flush_requested, False
        now = time.monotonic()
        keeps_alive = now - self._said_alive_at >= self.session.progress.keep_alive_s
        if self.queue.pending_effects:
            self._send_pending_effects()
        if keeps_alive and self.queue.connected:
            self._step(self.session.interval_passed)
        if keeps_alive and self._dealer.given_up:
            self._dealer.reconnect()
        if called or keeps_alive:
            self._acknowledge(now)
            self._said_alive_at = now

    def _watch(self) -> None:
        """Follow the connection: a new one says HELLO."""
        for event in self._dealer.events():
            self.queue.connected = event is ConnectionEvent.UP
            if event is ConnectionEvent.UP:
                self._step(self.session.connected)
            else:
                self.queue.last_failure = self._dealer.handshakes.trouble

    def _read(self) -> None:
        # Not more than half a window at once: the server waits for what the loop takes meanwhile to be acknowledged.
        for frames in islice(self._dealer.messages(), max(1, self.session.progress.identity.window // 2)):
            self._step(self.session.receive, *decode(frames))

    def _rebuild_ahead(self) -> None:
        """What is ready, so that a loop that is away need not wait for it."""
        away_s = max(self.away_before_s, time.monotonic() - self.last_asked)
        while self.asking_since is None and away_s >= AWAY_S and not self._flush_requested:
            with self.lock:
                if (unbuilt := self.queue.first_unbuilt) is None:
                    return
                self._rebuilt(*unbuilt)

    def _step(self, transition: Callable[..., list[Effect]], *arguments: object) -> None:
        """One transition of the session; what it forgets, the loop must not take meanwhile."""
        with self.lock:
            effects = transition(*arguments)
            for effect in effects:
                self._enqueue(effect)
        self._perform(effects)

    def _enqueue(self, effect: Effect) -> None:
        match effect:
            case Deliver():
                self.queue.entries.append(effect)
            case Finish():
                self.queue.entries.append(None)
            case Forget():
                self.queue.forget()
            case Fail(error):
                self.queue.fail(error)

    def _close(self) -> None:
        with self.lock:
            self.changed.wait_for(lambda: not self._owned)
            self._owned = True  # for good
        if self.leaving or self.session.state is State.ENDED:
            self._dealer.linger()
            if self.queue.connected:
                self._acknowledge(time.monotonic())  # the loop may have taken the last one just now
                self._send(Send(self.session.bye()))
        self._dealer.close()

    def _send_pending_effects(self) -> None:
        with self.lock:
            effects = self.queue.pending_effects
            for effect in effects:
                self._enqueue(effect)
        self._perform(effects)
        with self.lock:
            self.queue.mark_sent(effects)

    def _acknowledge(self, now: float) -> None:
        with self.lock:
            if not self.queue.connected or self.session.state not in (State.STREAMING, State.ENDED):
                return
            idle = 0.0 if self.asking_since is not None else now - self.last_asked
            ack = self.session.ack(idle)
            self.queue.unacknowledged = 0
        self._send(Send(ack))

    def _perform(self, effects: list[Effect]) -> None:
        """What is the socket's to do; the loop has heard the rest together with the transition."""
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Reconnect():
                    self._reconnect()

    def _reconnect(self) -> None:
        self.queue.connected = self._socket_dirty = False
        self._dealer.reconnect()

    def _send(self, effect: Send) -> None:
        if not self._dealer.send([encode(effect.message), *effect.extra]):
            # The connection went down meanwhile: the next one begins with HELLO, which says it all again.
            self.queue.connected = False

    def _rebuilt(self, ahead: int, arrived: Deliver) -> MicroBatch:
        """What arrived, rebuilt, and ready in its place from now on. Whoever calls holds the lock.

        Raises nothing but ``PackhorseError``, which ends the thread too.
        """
        try:
            rebuilt = self._finish(self.session.progress.rebuild(arrived))
        except Exception as error:  # whatever it is, the loop must hear of it
            self._fail(error)
            raise self._named(error) from error
        self.queue.entries[ahead] = rebuilt
        return rebuilt

    def _named(self, error: Exception) -> PackhorseError:
        """Itself, or what stands for it in the loop."""
        if isinstance(error, PackhorseError):
            return error
        return TransportError(f"{self.endpoint}: the feed failed: {type(error).__name__}: {error}")

    def _fail(self, error: Exception) -> None:
        """Nothing will come: the loop hears why, the thread ends."""
        with self.lock:
            self.queue.fail(self._named(error))
            self.changed.notify_all()
        self._stopping.set()
        self._dealer.waker.wake()
