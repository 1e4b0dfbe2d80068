"""One trainer job: a ``packhorse tap`` for each rank, each behind a relay, and the server behind them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packhorse import Position
from tests.faults.oracle import check_same_attempts, check_whole_run
from tests.faults.processes import Launcher, RunningServer, RunningTap
from tests.faults.relay import Relay, Wire
from tests.faults.truth import Truth

FINISH_S = 200.0


@dataclass
class Job:
    launcher: Launcher
    truth: Truth
    wire: Wire
    relays: dict[int, Relay]
    server: RunningServer
    jobs: list[list[RunningTap]] = field(default_factory=list)  # each start of all ranks
    left_behind: list[Relay] = field(default_factory=list)  # of processes that outlive their job

    @property
    def taps(self) -> list[RunningTap]:
        """The running ranks."""
        return self.jobs[-1]

    def start(self, *arguments: str, of_rank: Mapping[int, Sequence[str]] | None = None) -> None:
        """Start every rank; ``of_rank`` adds arguments to some."""
        self.jobs.append([self._start(rank, [*arguments, *(of_rank or {}).get(rank, ())]) for rank in self.relays])
        self.wire.hopeless = self._ended

    def _ended(self) -> str:
        """Which ranks have ended by themselves, and why."""
        ended = (tap for tap in self.taps if not tap.alive and tap.process.returncode >= 0)
        return "; ".join(f"rank {tap.rank} has ended: {tap.last_words()}" for tap in ended)

    def _start(self, rank: int, arguments: Sequence[str]) -> RunningTap:
        endpoint, layout = self.relays[rank].endpoint, self.truth.layout
        return self.launcher.tap(endpoint, rank, layout, *arguments, pairs=bool(self.truth.stored))

    def leave_behind(self, rank: int) -> tuple[RunningTap, Relay]:
        """The running process of a rank keeps its relay; the rank's next process gets another."""
        relay = self.relays[rank]
        self.left_behind.append(relay)
        self.relays[rank] = Relay(rank, self.wire, relay.target)
        return self.taps[rank], relay

    def checkpoint(self) -> Path | None:
        """A copy of the last state that every rank has saved; none before the first step."""
        positions = [tap.saved() for tap in self.taps]
        if None in positions:
            return None
        lowest = min(self.taps, key=lambda tap: tap.saved() or Position(0, 0))
        copy = self.launcher.folder / f"checkpoint-{len(self.jobs)}.json"
        shutil.copy(lowest.state, copy)
        return copy

    def restart(self, checkpoint: Path | None, *arguments: str) -> None:
        """All ranks die, and begin again from a checkpoint."""
        for tap in self.taps:
            if tap.alive:
                tap.kill()
        self.start(*arguments, *(["--resume", str(checkpoint)] if checkpoint else []))

    def serve(self, *arguments: str, config: Path | None = None) -> RunningServer:
        """Start a server that nobody is led to yet."""
        return self.launcher.serve(config or self.truth.config, *arguments)

    def lead_to(self, server: RunningServer) -> None:
        """From now on the stable name leads there: connections to what was there before are cut."""
        self.server = server
        for relay in self.relays.values():
            relay.target = server.endpoint
            relay.cut()

    def replace_server(self, server: RunningServer) -> None:
        """SIGKILL, and another one behind the name."""
        assert self.server.alive, self.server.last_words()
        self.server.kill()
        self.lead_to(server)

    def wait_taken(self, count: int) -> None:
        for tap in self.taps:
            tap.wait_taken(count)

    def finish(self) -> None:
        """Every rank reaches the end, the server leaves behind them, and the run was what it must be."""
        for tap in self.taps:
            assert tap.exit_code(FINISH_S) == 0, tap.last_words()
        assert self.server.exit_code(FINISH_S) == 0, self.server.last_words()
        self.check()

    def check(self) -> None:
        check_whole_run(self.truth, [tap for job in self.jobs for tap in job])
        check_same_attempts(self.jobs)


@contextlib.contextmanager
def job_of(truth: Truth, launcher: Launcher, config: Path | None = None) -> Iterator[Job]:
    """A job whose server is started; its ranks are not."""
    wire = Wire()
    relays = {rank: Relay(rank, wire) for rank in range(truth.layout.world_size)}
    job = Job(launcher, truth, wire, relays, launcher.serve(config or truth.config))
    try:
        job.lead_to(job.server)
        yield job
    finally:
        wire.release()
        for relay in (*relays.values(), *job.left_behind):
            relay.close()
