"""The client's only socket and its owner thread, and what it shares with the loop under one condition.

The thread always reads: only the delivery window bounds what is ready. It acknowledges what the loop takes, half a
window or a step at once. While the loop trains it rebuilds micro-batches, into pinned memory where there is CUDA; a
loop that comes sooner rebuilds them itself, which costs less than to wake one thread for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from packhorse.arrays import Arrays, finisher
from packhorse.contract import ResolvedContract
from packhorse.dealer import ConnectionEvent, Dealer
from packhorse.errors import PackhorseError, ProtocolError, TransportError
from packhorse.handover import Handover, Upcoming
from packhorse.keys import ClientKey
from packhorse.microbatch import MicroBatch
from packhorse.session import ClientSession, Deliver, Effect, Fail, Finish, Forget, Reconnect, Send, State
from packhorse.views import view_microbatch
from packhorse.wire import decode, encode

__all__ = ["END_WAIT_S", "Connection"]

KEEP_ALIVE_S = 1.0
AWAY_S = 0.002  # a loop that stays away so long has something to do meanwhile
END_WAIT_S = 30.0  # how long a reader that has ended stays until all others have


class Connection:
    """One stream's, of one rank."""

    def __init__(self, endpoint: str, session: ClientSession, arrays: Arrays, *, key: ClientKey | None = None) -> None:
        self.endpoint = endpoint
        self.session = session
        self.changed = threading.Condition()
        self.handover = Handover(session)
        self.asking_since: float | None = None
        self.last_asked = time.monotonic()
        self.was_away = 0.0  # for so long, before it asked last
        self.leaving = False
        self._stopping = False
        self._called = self._asleep = False
        self._leave_by = 0.0
        self._finish = finisher(arrays)
        self._dealer = Dealer(endpoint, key=key)

    def stop(self) -> None:
        self._leave_by = time.monotonic() + END_WAIT_S
        self._stopping = True
        self._dealer.ring()

    @property
    def _needed(self) -> bool:
        """Whether the others may still need this reader, which has ended: a new server meets all or none."""
        waits = self.session.state is State.ENDED and not self.session.released
        return waits and time.monotonic() < self._leave_by

    def call(self) -> None:
        """There is something to say. Whoever calls holds the condition.

        A thread that is not asleep looks by itself before it sleeps: to wake it costs the loop more than to take.
        """
        self._called = True
        if self._asleep:
            self._asleep = False
            self._dealer.ring()

    # The loop ----------------------------------------------------------------------------------------

    def ask(self) -> float:
        """The loop asks from now on; returns when that is."""
        self.asking_since = now = time.monotonic()
        self.was_away = now - self.last_asked
        return now

    def asked(self) -> None:
        """The loop has its answer."""
        self.last_asked = time.monotonic()
        self.asking_since = None

    def rebuild(self, upcoming: Upcoming) -> None:
        """As the thread would have done; what is wrong with it ends the thread too."""
        try:
            upcoming.make()
        except PackhorseError as error:
            self._fail(error)
            self._stopping = True
            self._dealer.ring()
            raise

    def take(self) -> None:
        """The next is handed out. Whoever calls holds the condition."""
        self.handover.take()
        if self.handover.acknowledgement_due:
            self.call()

    # The thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Own the socket until asked to stop; an error ends up in the loop."""
        try:
            self._work()
        except PackhorseError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the loop must hear that nothing will come
            self._fail(self._failed(error))
        finally:
            self._close()

    def _work(self) -> None:
        next_keep_alive = 0.0
        while not self._stopping or self._needed:
            called = self._sleep()
            if self.asking_since is not None:
                self._wake()
            if called:
                self._say_unsaid()
            now = time.monotonic()
            self._rebuild_ahead(now)
            if now >= next_keep_alive and self.handover.connected:
                self._step(self.session.interval_passed)
            if now >= next_keep_alive and self._dealer.given_up:
                self._dealer.reconnect()
            if called or now >= next_keep_alive:
                self._acknowledge(now)
                next_keep_alive = now + KEEP_ALIVE_S

    def _sleep(self) -> bool:
        """Until something happens; whether the loop has called since the last time."""
        with self.changed:
            self._asleep = not self._called
            patience_s = KEEP_ALIVE_S if self.handover.raw is None else AWAY_S
        stirred = self._dealer.wait(patience_s if self._asleep else 0.0)
        with self.changed:
            self._asleep = False
            called, self._called = self._called, False
        if stirred.connection:
            self._watch()
        if stirred.messages:
            self._read()
        return called

    def _watch(self) -> None:
        """Follow the connection: a new one says HELLO."""
        for event in self._dealer.events():
            self.handover.connected = event is ConnectionEvent.UP
            if event is ConnectionEvent.UP:
                self._step(self.session.connected)
            else:
                self.handover.last_failure = self._dealer.handshakes.trouble

    def _read(self) -> None:
        # Not more than half a window at once: the server waits for what the loop takes meanwhile to be acknowledged.
        for frames in islice(self._dealer.messages(), max(1, self.session.identity.window // 2)):
            message, extra = decode(frames)
            self._step(partial(self.session.receive, message, extra))

    def _rebuild_ahead(self, now: float) -> None:
        """What is ready, so that a loop that is away need not wait for it."""
        while self.asking_since is None and max(self.was_away, now - self.last_asked) >= AWAY_S and not self._called:
            with self.changed:
                upcoming = self.handover.raw
            if upcoming is None:
                return
            upcoming.make()

    def _step(self, transition: Callable[[], list[Effect]]) -> None:
        """One transition of the session; what it forgets, the loop must not take meanwhile."""
        with self.changed:
            effects = transition()
            for effect in effects:
                self._hand_over(effect)
        self._carry_out(effects)

    def _hand_over(self, effect: Effect) -> None:
        match effect:
            case Deliver():
                self.handover.ready.append(self._upcoming(effect))
            case Finish():
                self.handover.ready.append(None)
            case Forget():
                self.handover.forget()
            case Fail(error):
                self.handover.fail(error)

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _close(self) -> None:
        if self.leaving or self.session.state is State.ENDED:
            self._dealer.linger()
            if self.handover.connected:
                self._acknowledge(time.monotonic())  # the loop may have taken the last one just now
                self._send(Send(self.session.bye()))
        self._dealer.close()

    def _say_unsaid(self) -> None:
        with self.changed:
            effects = self.handover.unsaid
            for effect in effects:
                self._hand_over(effect)
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
            self.handover.unacknowledged = 0
        self._send(Send(ack))

    def _carry_out(self, effects: list[Effect]) -> None:
        """What is the socket's to do; the loop has heard the rest together with the transition."""
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Reconnect():
                    self.handover.connected = False
                    self._dealer.reconnect()

    def _send(self, effect: Send) -> None:
        if not self._dealer.send([encode(effect.message), *effect.extra]):
            # The connection went down meanwhile: the next one begins with HELLO, which says it all again.
            self.handover.connected = False

    def _upcoming(self, arrived: Deliver) -> Upcoming:
        contract = self.session.contract
        if contract is None:
            raise ProtocolError("BATCH before WELCOME")
        return Upcoming(partial(self._rebuilt, arrived, contract))

    def _rebuilt(self, arrived: Deliver, contract: ResolvedContract) -> MicroBatch:
        """By the contract under which it came. Raises nothing but ``PackhorseError``."""
        identity, payload = self.session.identity, memoryview(arrived.payload)
        try:
            return self._finish(
                view_microbatch(arrived.body, payload, contract, identity.layout, identity.reader.context)
            )
        except PackhorseError:
            raise
        except Exception as error:  # whatever it is, the thread must end and the loop hear of it
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> TransportError:
        return TransportError(f"{self.endpoint}: the feed failed: {type(error).__name__}: {error}")

    def _fail(self, error: PackhorseError) -> None:
        with self.changed:
            self.handover.fail(error)
            self.changed.notify_all()
