"""What is done with the client's socket, by whoever owns it: read, follow the connection, send."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import islice

from packhorse.codec.microbatch import MicroBatch
from packhorse.protocol.client_session import ClientSession
from packhorse.protocol.effects import Effect, Reconnect, Send
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.transport.loop_activity import LoopActivity
from packhorse.transport.polling import PollResult
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.transport.socket_ownership import SocketOwnership
from packhorse.wire.messages import Message, decode, encode

__all__ = ["SocketWorker"]


class SocketWorker:
    """Work on the socket of one reader; its owner alone calls this, without the lock.

    What the session says of the queue is done under the lock together with the transition: what it forgets, the loop
    must not take meanwhile.
    """

    def __init__(
        self,
        dealer: Dealer,
        queue: ReadyQueue[MicroBatch],
        activity: LoopActivity,
        ownership: SocketOwnership,
        lock: threading.RLock,
    ) -> None:
        self.dealer = dealer
        self.session: ClientSession = queue.session
        self.queue = queue
        self.activity = activity
        self.ownership = ownership
        self.lock = lock
        self._said_alive_at = -math.inf

    def handle(self, polled: PollResult) -> None:
        """Read what a poll has found, and send what there is to send."""
        if polled.connections:
            self._follow_connection()
        if polled.messages:
            self._read()
        self.flush()

    def flush(self) -> None:
        """Send what was requested; and every keep-alive interval, that this reader lives."""
        with self.lock:
            requested = self.ownership.take_request()
        now = time.monotonic()
        keeps_alive = now - self._said_alive_at >= self.session.progress.keep_alive_s
        if self.queue.pending_effects:
            self._send_pending_effects()
        if keeps_alive and self.queue.connected:
            self._step(self.session.interval_passed)
        if keeps_alive and self.dealer.given_up:
            self.dealer.reconnect()
        if requested or keeps_alive:
            self._acknowledge(now)
            self._said_alive_at = now

    def reconnect(self) -> None:
        """Make the socket anew; the next connection says HELLO."""
        self.queue.connected = False
        self.dealer.reconnect()

    def close(self, *, orderly: bool) -> None:
        """Close the socket; an ``orderly`` leave acknowledges what was taken last, and says BYE."""
        if orderly:
            self.dealer.linger()
            if self.queue.connected:
                self._acknowledge(time.monotonic())
                self._send(self.session.bye())
        self.dealer.close()

    def _follow_connection(self) -> None:
        """Follow the connection: a new one says HELLO."""
        for event in self.dealer.events():
            self.queue.connected = event is ConnectionEvent.UP
            if event is ConnectionEvent.UP:
                self._step(self.session.connected)
            else:
                self.queue.last_failure = self.dealer.handshakes.trouble

    def _read(self) -> None:
        # Not more than half a window at once: the server waits for what the loop takes meanwhile to be acknowledged.
        for frames in islice(self.dealer.messages(), max(1, self.session.progress.identity.window // 2)):
            self._step(self.session.receive, *decode(frames))

    def _step(self, transition: Callable[..., list[Effect]], *arguments: object) -> None:
        with self.lock:
            effects = transition(*arguments)
            self.queue.apply(effects)
        self._perform(effects)

    def _send_pending_effects(self) -> None:
        with self.lock:
            effects = self.queue.pending_effects
            self.queue.apply(effects)
        self._perform(effects)
        with self.lock:
            self.queue.mark_sent(effects)

    def _acknowledge(self, now: float) -> None:
        with self.lock:
            ack = self.queue.ack(self.activity.idle_s(now))
        if ack is not None:
            self._send(ack)

    def _perform(self, effects: list[Effect]) -> None:
        """Carry out what is the socket's to do."""
        for effect in effects:
            match effect:
                case Send(message, extra):
                    self._send(message, *extra)
                case Reconnect():
                    self.reconnect()

    def _send(self, message: Message, *extra: bytes | bytearray | memoryview) -> None:
        if not self.dealer.send([encode(message), *extra]):
            # The connection went down meanwhile: the next one begins with HELLO, which says it all again.
            self.queue.connected = False
