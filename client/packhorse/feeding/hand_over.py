"""What the loop takes and is given: the two are one act, whatever interrupts it.

Python raises an interrupt (SIGINT, an asynchronous exception) between any two of its instructions, so no function
written in it can both note that a micro-batch was taken and return it. What was taken is therefore *owed* until the
last moment: it waits in a deque, and what takes it out of there and gives it to the loop is C alone (``map``,
``deque.popleft``). Whoever asks next gets what is owed first, and a state counts it as not taken.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import PackhorseError
from packhorse.feeding.loop_waits import LoopWaits
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import State
from packhorse.transport.connection import Connection

__all__ = ["HandOver", "given"]

Owed = deque[Any]  # micro-batches in their order, or one tuple of a whole step; ``None`` is the end


def given(prepare: Callable[[], Owed]) -> Callable[[], Any]:
    """Return a function that calls ``prepare`` and takes the first out of what that returns, in one act."""
    return map(deque.popleft, iter(prepare, None)).__next__


@dataclass(slots=True)
class Hand:
    """Micro-batches that one thread of the loop has taken and was not given yet."""

    owed: Owed = field(default_factory=deque)
    before: Position = ORIGIN  # where the session stood before the last of it was taken

    @property
    def first(self) -> Position | None:
        """Position of the first that is owed; any thread may ask, while its own is given it."""
        for first in list(self.owed)[:1]:
            if first is None:
                return self.before
            position: Position = first[0].position if type(first) is tuple else first.position
            return position
        return None


class HandOver:
    """Micro-batches that the loop of a feed has taken of its connection and was not given yet, in each thread of it."""

    def __init__(self, connection: Connection, waits: LoopWaits, life: weakref.finalize[Any, Any]) -> None:
        self.taken = 0  # micro-batches
        self._connection = connection
        self._waits = waits
        self._life = life  # of the feed, which has ended once it is closed
        self._pid = os.getpid()
        self._hands: defaultdict[int, Hand] = defaultdict(Hand)
        self._one = given(self.prepare)
        self.next = iter(self._one, None).__next__  # made anew at each end, behind which it gives nothing more

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate from where the loop stands to the next end."""
        return iter(self._one, None)

    def steps(self) -> Iterator[tuple[MicroBatch, ...]]:
        """Iterate whole steps to the next end; nothing of a step counts as taken before it is given."""
        return iter(given(self._prepare_step), None)

    @property
    def position(self) -> Position:
        """Position of the next micro-batch to give; one step further once the end was given."""
        with self._connection.lock:
            return self._first_owed() or self._connection.session.position

    def saved(self, step: int | None) -> FeedState:
        """Return where the loop stands, by what it was given, or the boundary before an earlier ``step``."""
        with self._connection.lock:
            return self._connection.session.saved(step, self._first_owed())

    def _first_owed(self) -> Position | None:
        firsts = (hand.first for hand in list(self._hands.values()))
        return min((first for first in firsts if first is not None), default=None)

    def prepare(self) -> Owed:
        """Return a deque whose first is the next to give: a micro-batch, or the end."""
        hand = self._hands[get_ident()]
        if hand.owed:  # of an interrupted call, or of a step that did not get whole
            self._settle(hand)
        if not hand.owed:
            self._take(hand)
        elif type(hand.owed[0]) is tuple:
            hand.owed = deque(hand.owed[0])
        return self._before_given(hand)

    def _prepare_step(self) -> Owed:
        """Return a deque whose first is the next whole step, or the end."""
        hand = self._hands[get_ident()]
        self._settle(hand)
        while not hand.owed or not _ends_step(hand.owed[-1]):
            self._take(hand)
        if hand.owed[-1] is not None and type(hand.owed[0]) is not tuple:
            hand.owed = deque((tuple(hand.owed),))
        return self._before_given(hand)

    def _before_given(self, hand: Hand) -> Owed:
        if hand.owed[0] is None:
            self.next = iter(self._one, None).__next__
        return hand.owed

    def peek(self, ahead: int) -> MicroBatch | None:
        """Return the micro-batch so far ahead of the next, which stays; ``None`` behind the end."""
        hand = self._hands[get_ident()]
        self._settle(hand)
        if ahead < len(hand.owed):
            owed: MicroBatch | None = hand.owed[ahead]
            return owed
        return self._await(ahead - len(hand.owed), None)

    def _take(self, hand: Hand) -> None:
        """Take the next micro-batch or end, which then is owed."""
        self.taken += self._await(0, hand) is not None

    def _await(self, ahead: int, hand: Hand | None) -> MicroBatch | None:
        """Return the micro-batch so far ahead; where there is a ``hand``, take it for that.

        Blocks until it is there, the stream has ended, or a deadline has passed.
        """
        if os.getpid() != self._pid:
            raise PackhorseError("a Feed cannot be used in a forked process; create it where it is iterated")
        if not self._life.alive:
            raise PackhorseError("this Feed is closed; create another to go on")
        connection = self._connection
        began = connection.activity.begin_wait(time.monotonic())
        try:
            while True:
                with connection.lock:
                    if settled := connection.queue.has_answer(ahead):
                        micro_batch = self._look(ahead, hand)
                if settled:
                    break
                self._waits.wait(began, ahead)
            connection.flush()
            return micro_batch
        finally:
            connection.activity.end_wait(time.monotonic())

    def _look(self, ahead: int, hand: Hand | None) -> MicroBatch | None:
        if hand is None:
            return self._connection.peek_or_take(ahead, None)
        hand.before = self._connection.session.progress.position
        return self._connection.peek_or_take(ahead, hand.owed)

    def _settle(self, hand: Hand) -> None:
        """Bring what is owed, the queue and the session to one place: an interrupt may have come between them."""
        if not hand.owed or type(hand.owed[0]) is tuple:
            return
        with self._connection.lock:
            session, queue, last = self._connection.session, self._connection.queue, hand.owed[-1]
            progress = session.progress
            ended = session.state is State.ENDED or progress.position.step in progress.snapshots
            if last is None and not ended:
                progress.position = hand.before  # interrupted in the midst of the end: it is taken again
            if progress.position == (hand.before if last is None else last.position):
                hand.owed.pop()
            elif queue.entries and queue.entries[0] is last:
                queue.entries.popleft()


def _ends_step(last: Any) -> bool:
    return last is None or type(last) is tuple or last.index == last.num_microbatches - 1
