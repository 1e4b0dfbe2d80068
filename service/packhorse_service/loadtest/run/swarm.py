"""Many simulated ranks in one thread: their sockets under one selector and one ZeroMQ context, and the clock.

A rank costs nothing while nothing happens to it: the selector names those whose sockets have something, a heap
those whose think time or keep-alive interval is over.
"""

from __future__ import annotations

import heapq
import os
import random
import selectors
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

import zmq

from packhorse.errors import PackhorseError, ProtocolError
from packhorse.protocol.client_session import (
    ClientSession,
    Deliver,
    Effect,
    Fail,
    Finish,
    Forget,
    Identity,
    Reconnect,
    Send,
)
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.transport.key_files import ClientKey, find_client_key
from packhorse.wire.messages import Frames, decode, encode
from packhorse_service.loadtest.run.rank_results import progress_of, result_of
from packhorse_service.loadtest.run.simulated_rank import MeasureWindow, RebuiltMicroBatch, SimulatedRank, ThinkTime
from packhorse_service.loadtest.run.wait_histogram import WaitHistogram
from packhorse_service.loadtest.run.worker_messages import (
    COMMANDS,
    Go,
    Job,
    Leave,
    Measure,
    Ready,
    Report,
    WorkerProgress,
)
from packhorse_service.tap import verified

__all__ = ["Swarm"]

STREAM = "train"
SOCKETS_PER_RANK = 3  # the dealer, and the two ends of its monitor
REPORT_S = 0.5
STAY_S = 60.0  # a coordinator that has heard the result answers within this
CLIENT_ID_BYTES = 16


@dataclass(slots=True, eq=False)
class RankConnection:
    """A rank and its socket."""

    number: int
    rank: SimulatedRank
    dealer: Dealer
    heap_due: float = inf  # the latest entry in the heap
    watched: tuple[int, ...] = ()


@dataclass(slots=True)
class Swarm:
    """``tell`` writes a line to the coordinator; ``commands`` is the file descriptor it is heard from."""

    job: Job
    commands: int
    tell: Callable[[Report], None]
    members: list[RankConnection] = field(default_factory=list)
    measured: MeasureWindow = field(default_factory=MeasureWindow)
    recent: WaitHistogram = field(default_factory=WaitHistogram)  # since the last report
    late: WaitHistogram = field(default_factory=WaitHistogram)
    disconnects: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _heap: list[tuple[float, int]] = field(default_factory=list)
    _unread: bytearray = field(default_factory=bytearray)  # of the coordinator
    _leaving: bool = False
    _key: ClientKey | None = None

    def run(self) -> None:
        """Until the period is over or every rank has ended or failed; then tell, and stay until told to leave."""
        self._key = find_client_key(self.job.key_file)
        self._context.set(zmq.MAX_SOCKETS, len(self.job.ranks) * SOCKETS_PER_RANK + 64)
        self._selector.register(self.commands, selectors.EVENT_READ, None)
        self.tell(Ready())
        next_report = time.monotonic()
        while not self._over(now := time.monotonic()):
            if now >= next_report:
                self.tell(self._progress(now))
                next_report = now + REPORT_S
            self._turn(next_report)
        self.tell(result_of(self.job, [member.rank for member in self.members], self.late, self.disconnects))
        self._stay()
        self._leave()

    def _over(self, now: float) -> bool:
        done = bool(self.members) and all(member.rank.ended or member.rank.error for member in self.members)
        return self._leaving or now >= self.measured.end_s or done

    def _turn(self, wake_at: float) -> None:
        """Wait until something happens, and do what it asks for."""
        nearest = min(wake_at, self._heap[0][0] if self._heap else inf, self.measured.end_s)
        ready = self._selector.select(max(nearest - time.monotonic(), 0.0))
        for member in dict.fromkeys(key.data for key, _ in ready):
            if member is None:
                self._hear()
            else:
                self._serve(member)
        for member in self._due(time.monotonic()):
            self._tick(member)

    # The coordinator ---------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Commands that have arrived; an end of the pipe means that nobody wants an answer any more."""
        data = os.read(self.commands, 1 << 16)
        self._leaving = self._leaving or not data
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            match COMMANDS.validate_json(bytes(line)):
                case Go():
                    self._connect_all()
                case Measure() as measure:
                    self._measure(measure)
                case Leave():
                    self._leaving = True

    def _measure(self, measure: Measure) -> None:
        self.measured = MeasureWindow(measure.from_s, measure.until_s, measure.stop_s, measure.resume_s)
        for member in self.members:
            member.rank.measured = self.measured

    def _connect_all(self) -> None:
        for number, rank in enumerate(self.job.ranks):
            member = RankConnection(number, self._simulated(rank), self._dealer())
            self.members.append(member)
            self._watch(member)
            member.rank.begin(time.monotonic())
            self._schedule(member)

    def _simulated(self, rank: int) -> SimulatedRank:
        job = self.job
        rng = random.Random(f"{job.seed} {rank}")
        session = ClientSession(
            Identity(
                stream=STREAM,
                reader=job.layout.coordinates(rank),
                client=os.urandom(CLIENT_ID_BYTES),
                layout=job.layout,
                contract=job.contract,
                window=job.window,
            )
        )
        consume_s = job.consume_s * (job.slow_factor if rank in job.slow else 1)
        think_time = ThinkTime(consume_s, job.jitter, stops=rank in job.stopped)
        return SimulatedRank(session, think_time, rng, on_wait=self.recent.add)

    def _dealer(self) -> Dealer:
        """The one place where a rank's socket is made."""
        return Dealer(self.job.endpoint, key=self._key, context=self._context)

    # One rank ----------------------------------------------------------------------------------------

    def _watch(self, member: RankConnection) -> None:
        for fileno in member.watched:
            self._selector.unregister(fileno)
        member.watched = member.dealer.filenos()
        for fileno in member.watched:
            self._selector.register(fileno, selectors.EVENT_READ, member)

    def _serve(self, member: RankConnection) -> None:
        """Whatever its sockets have; an error ends this rank alone."""
        try:
            for event in member.dealer.events():
                self._on_event(member, event)
            self._read(member)
        except PackhorseError as error:
            member.rank.fail(error)
        self._schedule(member)

    def _on_event(self, member: RankConnection, event: ConnectionEvent) -> None:
        if event is ConnectionEvent.UP:
            self._carry_out(member, member.rank.came_up(time.monotonic()))
        else:
            self.disconnects += 1
            member.rank.went_down()

    def _read(self, member: RankConnection) -> None:
        for frames in member.dealer.messages():
            message, extra = decode(frames)
            size = sum(map(len, frames))
            self._carry_out(member, member.rank.receive(message, extra, time.monotonic()), size)

    def _tick(self, member: RankConnection) -> None:
        try:
            if member.dealer.given_up:
                self._reconnect(member)
            self._carry_out(member, member.rank.tick(time.monotonic()))
            self._read(member)  # sending may have taken the news of a message from the selector
        except PackhorseError as error:
            member.rank.fail(error)
        self._schedule(member)

    def _carry_out(self, member: RankConnection, effects: list[Effect], size: int = 0) -> None:
        for effect in effects:
            match effect:
                case Send(message, extra):
                    self._send(member, [encode(message), *extra])
                case Deliver():
                    taken = self._rebuilt(member.rank, effect, size)
                    self._carry_out(member, member.rank.delivered(taken, taken.ready_s))
                case Finish():
                    self._carry_out(member, member.rank.delivered(None, time.monotonic()))
                case Forget():
                    pass  # the rank has, together with the transition
                case Reconnect():
                    member.rank.went_down()
                    self._reconnect(member)
                case Fail(error):
                    member.rank.fail(error)

    def _reconnect(self, member: RankConnection) -> None:
        member.dealer.reconnect()
        self._watch(member)

    def _send(self, member: RankConnection, frames: Frames) -> None:
        if not member.dealer.send(frames):
            member.rank.went_down()  # the next connection begins with HELLO, which says it all again

    def _rebuilt(self, rank: SimulatedRank, effect: Deliver, size: int) -> RebuiltMicroBatch:
        """All that a real rank does with a frame, its tensors included; they are not kept."""
        rebuilder = rank.session.rebuilder
        if rebuilder is None:
            raise ProtocolError("BATCH before WELCOME")
        rebuilt = rebuilder.rebuild(effect.body, memoryview(effect.payload))
        shares = 1 if rebuilt.holds_whole_row else rebuilt.context_size
        return RebuiltMicroBatch(
            position=rebuilt.position,
            digest=rebuilt.row_digest,
            tokens=rebuilt.num_tokens,
            delivered=rebuilt.num_tokens / shares,
            filler=rebuilt.filler,
            wire_bytes=size,
            verified=self.job.verify and verified(rebuilt),
            ready_s=time.monotonic(),
        )

    # Time --------------------------------------------------------------------------------------------

    def _schedule(self, member: RankConnection) -> None:
        """An entry for the next thing that the rank does by itself; entries that it outlived are skipped."""
        due = member.rank.due
        if due < inf and due != member.heap_due:
            heapq.heappush(self._heap, (due, member.number))
        member.heap_due = due

    def _due(self, now: float) -> Iterator[RankConnection]:
        while self._heap and self._heap[0][0] <= now:
            due, number = heapq.heappop(self._heap)
            member = self.members[number]
            if due == member.heap_due:
                member.heap_due = inf
                if self.measured.counts(now):
                    self.late.add(time.monotonic() - due)
                yield member

    # The end -----------------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Connected, as trainers are between two steps: the coordinator looks at the server as it is now."""
        deadline = time.monotonic() + STAY_S
        while not self._leaving and time.monotonic() < deadline:
            self._turn(deadline)

    def _leave(self) -> None:
        """Say BYE, where ranks leave in order or are at the end of the stream."""
        for member in self.members:
            if member.rank.connected and (self.job.orderly or member.rank.ended):
                member.dealer.linger()
                self._carry_out(member, member.rank.leave(time.monotonic()))
        for member in self.members:
            for fileno in member.watched:
                self._selector.unregister(fileno)
            member.dealer.close()
        self._context.term()

    def _progress(self, now: float) -> WorkerProgress:
        waits, self.recent.bins = self.recent.bins, Counter()
        return progress_of([member.rank for member in self.members], set(self.job.counted), waits, now)
