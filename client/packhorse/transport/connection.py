"""The client's connection: its thread, the loop that asks, and what the two share under one lock.

One of the two owns the socket at a time (``socket_ownership``). A loop that asks, and asks again soon, reads and
acknowledges itself, and the thread naps: to wake one thread for the other costs more than that takes. While the loop
is away, training, the thread reads all there is, so only the delivery window bounds what is ready, tells the server
that this reader lives, and rebuilds micro-batches, into pinned memory where there is CUDA. What the loop takes is
acknowledged half a window or a step at once (``ready_queue``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import PackhorseError, TransportError
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver
from packhorse.transport import loop_activity
from packhorse.transport.dealer import Dealer
from packhorse.transport.key_files import ClientKey
from packhorse.transport.loop_activity import LoopActivity
from packhorse.transport.micro_batch_builder import Convert, MicroBatchBuilder
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.transport.socket_ownership import Owner, SocketOwnership
from packhorse.transport.socket_worker import SocketWorker

__all__ = ["END_WAIT_S", "Connection"]

NAP_S = 0.02  # how often the thread looks whether the loop is away
END_WAIT_S = 30.0  # how long a reader that has ended stays until all others have


class Connection:
    """Connection of one rank for one stream; ``run`` is its thread, ``close`` is the thread's last act."""

    def __init__(
        self, endpoint: str, session: ClientSession, convert: Convert, *, key: ClientKey | None = None
    ) -> None:
        self.endpoint = endpoint
        self.session = session
        self.lock = threading.RLock()  # of all that the two share
        self.changed = threading.Condition(self.lock)
        self.queue: ReadyQueue[MicroBatch] = ReadyQueue(session)
        self.activity = LoopActivity(time.monotonic())
        self.leaving = False  # in order, with BYE
        self._leave_by = 0.0
        self._stopping = threading.Event()
        self._ownership = SocketOwnership()
        self._builder = MicroBatchBuilder(self.queue, convert, self.fail)
        self._worker = SocketWorker(Dealer(endpoint, key=key), self.queue, self.activity, self._ownership, self.lock)

    def stop(self) -> None:
        """Have the thread end, which closes the socket."""
        self._leave_by = time.monotonic() + END_WAIT_S
        self._stopping.set()
        self._worker.dealer.waker.wake()

    def _as_owner(self, owner: Owner, work: Callable[[], None]) -> bool:
        """Work the socket, unless somebody does or it is closed; return whether nobody did."""
        acquires = False
        try:
            with self.lock:
                self._ownership.abandon(threading.get_ident())
                if not self._ownership.can_be_acquired:
                    return False
                acquires = True  # first: an interrupt between the two releases what is not owned, which is nothing
                self._ownership.acquire(owner, threading.get_ident())
            work()
        finally:
            if acquires:
                with self.lock:
                    self._ownership.release(owner)
                    self.changed.notify_all()
        return True

    def _renew_if_dirty(self) -> None:
        """Make a socket anew that an interrupted loop has left; the server sends what was lost again."""
        if self._ownership.dirty:
            self._worker.reconnect()
            with self.lock:
                self._ownership.renewed()

    # The loop ----------------------------------------------------------------------------------------

    def peek_or_take(self, ahead: int, owed: deque[MicroBatch | None] | None) -> MicroBatch | None:
        """Return what is so far ahead, which has an answer; take the next where it is to be ``owed`` to the loop.

        Whoever calls holds the lock, and calls ``flush`` once it is free.
        """
        found = self.queue.peek(ahead)
        micro_batch = self._builder.build(ahead, found) if isinstance(found, Deliver) else found
        if owed is not None:
            owed.append(micro_batch)  # first: an interrupt in between leaves it in both places, and in none never
            self.queue.take(micro_batch)
            if self.queue.ack_due:
                self.request_flush()
        return micro_batch

    def request_flush(self) -> None:
        """Note that there is something to send. Whoever calls holds the lock, and calls ``flush`` once it is free."""
        if self._ownership.request_flush():
            self._worker.dealer.waker.wake()

    def flush(self) -> None:
        """Send what the loop has requested, unless the thread is at it."""
        if self._ownership.flush_requested and not self._stopping.is_set():
            self._as_owner(Owner.LOOP, partial(self._for_the_loop, self._worker.flush))

    def wait(self, ahead: int, patience_s: float) -> None:
        """Wait until something has happened that may answer what is so far ahead, ``patience_s`` seconds at most."""
        poll = partial(self._for_the_loop, partial(self._poll_in_loop, patience_s))
        if self._stopping.is_set() or not self._as_owner(Owner.LOOP, poll):
            with self.lock:
                others = self._stopping.is_set() or not self._ownership.can_be_acquired
                if others and not self.queue.has_answer(ahead):
                    self.changed.wait(patience_s)

    def _poll_in_loop(self, patience_s: float) -> None:
        self._worker.handle(self._worker.dealer.wait(patience_s))

    def _for_the_loop(self, work: Callable[[], None]) -> None:
        """Do ``work``; what goes wrong ends the thread, and is raised behind what is ready; an interrupt at once."""
        try:
            self._renew_if_dirty()
            work()
        except Exception as error:  # noqa: BLE001  whatever it is, it waits its turn
            self.fail(error)
        except BaseException:
            with self.lock:
                self._ownership.interrupted()
            raise

    # The thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the socket while the loop does not, until asked to stop; an error ends up in the loop."""
        try:
            while not self._stopping.is_set() or self._awaited_by_others:
                if self.activity.asks_soon(time.monotonic()) or not self._as_owner(Owner.THREAD, self._poll_in_thread):
                    self._stopping.wait(NAP_S)
                else:
                    self._rebuild_ahead()
        except Exception as error:  # noqa: BLE001  whatever it is, the loop must hear that nothing will come
            self.fail(error)
        finally:
            self._close()

    @property
    def _awaited_by_others(self) -> bool:
        """True while the others may still need this reader, which has ended: a new server meets all or none."""
        waits = self.session.state is State.ENDED and not self.session.progress.released
        return waits and time.monotonic() < self._leave_by

    def _poll_in_thread(self) -> None:
        """Wait until something happens, unless the loop has requested something, and do what there is to do."""
        self._renew_if_dirty()
        with self.lock:
            waits = self._ownership.begin_poll()
            longest = self.queue.first_unbuilt is None
        patience_s = self.session.progress.keep_alive_s if longest else loop_activity.AWAY_S
        polled = self._worker.dealer.wait(patience_s if waits else 0.0)
        with self.lock:
            self._ownership.end_poll()
        self._worker.handle(polled)

    def _rebuild_ahead(self) -> None:
        """Rebuild what is ready, so that a loop that is away need not wait for it."""
        while self.activity.is_away(time.monotonic()) and not self._ownership.flush_requested:
            with self.lock:
                if not self._builder.build_next():
                    return

    def _close(self) -> None:
        """Close the socket, once the loop does not work it."""
        with self.lock:
            self.changed.wait_for(self._ownership.close)
        self._worker.close(orderly=self.leaving or self.session.state is State.ENDED)

    def fail(self, error: Exception) -> PackhorseError:
        """Have the loop hear why nothing will come, and the thread end; return what is raised for ``error``."""
        named = error
        if not isinstance(named, PackhorseError):
            named = TransportError(f"{self.endpoint}: the feed failed: {type(error).__name__}: {error}")
        with self.lock:
            self.queue.fail(named)
            self.changed.notify_all()
        self._stopping.set()
        self._worker.dealer.waker.wake()
        return named
