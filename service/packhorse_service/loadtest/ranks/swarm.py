"""Many simulated ranks in one thread: their sockets under one selector and one ZeroMQ context, and the clock.

A rank costs nothing while nothing happens to it: the selector names those whose sockets have something, a heap
those whose think time or keep-alive interval is over.
"""

from __future__ import annotations

import os
import random
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from packhorse.protocol.client_session import ClientSession
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.transport.dealer import Dealer
from packhorse.transport.key_files import ClientKey, find_client_key
from packhorse.transport.ready_queue import ReadyQueue
from packhorse_service.loadtest.ranks.command_reader import CommandReader
from packhorse_service.loadtest.ranks.rank_connection import RankConnection
from packhorse_service.loadtest.ranks.rank_counters import MeasureWindow, RankCounters
from packhorse_service.loadtest.ranks.rank_results import progress_of, result_of
from packhorse_service.loadtest.ranks.rank_timers import RankTimers
from packhorse_service.loadtest.ranks.simulated_loop import SimulatedLoop, ThinkTime
from packhorse_service.loadtest.ranks.simulated_rank import SimulatedRank
from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram
from packhorse_service.loadtest.ranks.worker_messages import (
    Connect,
    Job,
    Leave,
    Measure,
    Ready,
    Report,
    WorkerProgress,
    WorkerResult,
)

__all__ = ["Swarm"]

STREAM = "train"
SOCKETS_PER_RANK = 3  # the dealer, and the two ends of its monitor
REPORT_S = 0.5
STAY_S = 60.0  # a coordinator that has the result answers within this
CLIENT_ID_BYTES = 16


@dataclass(slots=True)
class Swarm:
    """Ranks of one worker; ``commands`` come from the coordinator, ``send`` takes a report to it."""

    job: Job
    commands: CommandReader
    send: Callable[[Report], None]
    connections: list[RankConnection] = field(default_factory=list)
    timers: RankTimers = field(init=False)
    measured: MeasureWindow = field(default_factory=MeasureWindow)
    recent: WaitHistogram = field(default_factory=WaitHistogram)  # waits since the last report
    late: WaitHistogram = field(default_factory=WaitHistogram)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _leaving: bool = False
    _key: ClientKey | None = None

    def __post_init__(self) -> None:
        self.timers = RankTimers(self.connections)

    def run(self) -> None:
        """Run until the time is over or every rank has ended or failed; report, and stay until told to leave."""
        self._key = find_client_key(self.job.key_file)
        self._context.set(zmq.MAX_SOCKETS, len(self.job.ranks) * SOCKETS_PER_RANK + 64)
        self._selector.register(self.commands.fileno, selectors.EVENT_READ, None)
        self.send(Ready())
        next_report = time.monotonic()
        while not self._is_over(now := time.monotonic()):
            if now >= next_report:
                self.send(self._progress(now))
                next_report = now + REPORT_S
            self._run_once(next_report)
        self.send(self._result())
        self._stay()
        self._leave()

    def _is_over(self, now: float) -> bool:
        ranks = [connection.rank for connection in self.connections]
        done = bool(ranks) and all(rank.ended or rank.error for rank in ranks)
        return self._leaving or now >= self.measured.end_s or done

    def _run_once(self, wake_at: float) -> None:
        """Wait until something happens, and do what it asks for."""
        nearest = min(wake_at, self.timers.next_due, self.measured.end_s)
        ready = self._selector.select(max(nearest - time.monotonic(), 0.0))
        for number in dict.fromkeys(key.data for key, _ in ready):
            if number is None:
                self._receive_commands()
            else:
                self.connections[number].serve()
                self.timers.schedule(number)
        now = time.monotonic()
        for due, number in self.timers.due(now):
            if self.measured.counts(now):
                self.late.add(time.monotonic() - due)
            self.connections[number].tick()
            self.timers.schedule(number)

    # The coordinator ---------------------------------------------------------------------------------

    def _receive_commands(self) -> None:
        """Obey; an end of the pipe means that nobody wants an answer any more."""
        for command in self.commands.read():
            match command:
                case Connect():
                    self._connect_all()
                case Measure():
                    self._measure(command)
                case Leave():
                    self._leaving = True
        self._leaving = self._leaving or self.commands.closed

    def _measure(self, measure: Measure) -> None:
        self.measured = MeasureWindow(measure.from_s, measure.until_s, measure.stop_s, measure.resume_s)
        for connection in self.connections:
            connection.rank.counters.measured = self.measured

    def _progress(self, now: float) -> WorkerProgress:
        ranks = [connection.rank for connection in self.connections]
        return progress_of(ranks, set(self.job.counted), self.recent.take_bins(), now)

    def _result(self) -> WorkerResult:
        ranks = [connection.rank for connection in self.connections]
        disconnects = sum(connection.disconnects for connection in self.connections)
        return result_of(self.job, ranks, self.late, disconnects)

    # Begin and end -----------------------------------------------------------------------------------

    def _connect_all(self) -> None:
        for number, rank in enumerate(self.job.ranks):
            simulated, dealer = self._simulated(rank), self._dealer()
            connection = RankConnection(number, simulated, dealer, self._selector, self.job.verify)
            self.connections.append(connection)
            connection.begin()
            self.timers.schedule(number)

    def _simulated(self, rank: int) -> SimulatedRank:
        job = self.job
        identity = Identity(
            stream=STREAM,
            reader=job.layout.coordinates(rank),
            client=os.urandom(CLIENT_ID_BYTES),
            layout=job.layout,
            contract=job.contract,
            window=job.window,
        )
        session = ClientSession(ReaderProgress(identity))
        consume_s = job.consume_s * (job.slow_factor if rank in job.slow else 1)
        think_time = ThinkTime(consume_s, job.jitter, stops=rank in job.stopped)
        loop = SimulatedLoop(think_time, random.Random(f"{job.seed} {rank}"))
        return SimulatedRank(ReadyQueue(session), loop, RankCounters(on_wait=self.recent.add))

    def _dealer(self) -> Dealer:
        """Return a socket: the one place where a rank's is made."""
        return Dealer(self.job.endpoint, key=self._key, context=self._context)

    def _stay(self) -> None:
        """Stay connected, as trainers are between two steps: the coordinator looks at the server as it is now."""
        deadline = time.monotonic() + STAY_S
        while not self._leaving and time.monotonic() < deadline:
            self._run_once(deadline)

    def _leave(self) -> None:
        """Say BYE, where ranks leave in order or are at the end of the stream, and close all sockets."""
        for connection in self.connections:
            if connection.rank.queue.connected and (self.job.orderly or connection.rank.ended):
                connection.say_bye()
        for connection in self.connections:
            connection.close()
        self._context.term()
