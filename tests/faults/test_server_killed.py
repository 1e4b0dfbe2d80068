"""The server is killed at any moment: whoever takes its place goes on, from what the readers hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from packhorse.wire.messages import Ack, Batch, End, GetSnapshot, Message, Snapshot, Welcome
from tests.faults.job import Job, job_of
from tests.faults.oracle import check_whole_run
from tests.faults.processes import Launcher, RunningServer
from tests.faults.relay import Seen
from tests.faults.truth import Truth

KILLS = 22
EARLY = 4  # of them while the attempt returns


def test_killed_at_any_moment_behind_a_stable_name(long: Truth, launcher: Launcher, moments: random.Random) -> None:
    """Each new server listens on another port and has another number of loaders."""
    seen: Counter[str] = Counter()
    early = set(moments.sample(range(1, KILLS), EARLY))
    with job_of(long, launcher) as job:
        job.start(of_rank={1: ["--delay", "0.01"]})
        for kill in range(KILLS):
            spare = job.serve(config=long.with_workers(kill % 3))
            job.wire.hold_after(moments.randint(1, 6) if kill in early else moments.randint(12, 26))
            assert spare.endpoint != job.server.endpoint
            job.server.kill()
            seen["in flight"] += job.wire.in_flight
            seen["in different steps"] += len(job.wire.steps) > 1
            job.lead_to(spare)
            job.wire.release()
        job.finish()
    assert seen["in flight"] >= 15, seen
    assert seen["in different steps"] >= 5, seen


def to_rank_one(kind: type[Message]) -> Callable[[Seen], bool]:
    """The moment when rank 1 is about to be sent such a message, and rank 0 was sent its own."""
    heard: set[int] = set()

    def stop(seen: Seen) -> bool:
        if isinstance(seen.message, kind):
            heard.add(seen.rank)
        return heard == {0, 1}

    return stop


def a_message(*kinds: type[Message]) -> Callable[[Seen], bool]:
    """The moment when a message of these kinds is about to be forwarded."""
    return lambda seen: isinstance(seen.message, kinds)


MOMENTS_OF_RETURN = {
    "asking for the snapshot": a_message(GetSnapshot),
    "getting the snapshot": a_message(Snapshot),
    "the first WELCOME": a_message(Welcome),
    "the first row made again": a_message(Batch),
}


def test_killed_again_at_each_moment_of_its_replay(job: Job) -> None:
    job.start("--delay", "0.01")
    job.wait_taken(9)
    spare = job.serve()
    job.wire.hold_after(3)
    for moment in MOMENTS_OF_RETURN.values():
        job.replace_server(spare)
        spare = job.serve()
        job.wire.release()
        job.wire.hold(moment)
        assert spare.endpoint
    job.replace_server(spare)
    job.wire.release()
    job.finish()


@pytest.mark.parametrize("answered", [False, True], ids=["", "with its answer on the way"])
def test_killed_between_two_welcomes(job: Job, answered: bool) -> None:
    """One rank is welcomed, the other is not; no row was sent."""
    job.start()
    job.wire.hold(to_rank_one(Ack if answered else Welcome))
    job.replace_server(job.serve())
    job.wire.release()
    job.finish()


def test_killed_between_two_ends(job: Job) -> None:
    """One rank has been told the end, the other has not: it hears it from the next server."""
    job.start()
    job.wire.hold(to_rank_one(End))
    job.replace_server(job.serve())
    job.wire.release()
    job.finish()


def test_killed_together_with_the_rank_that_is_furthest_behind(short: Truth, launcher: Launcher) -> None:
    """Ranks cannot be replaced one by one: all begin again from the last checkpoint, and the rest is exact."""
    with job_of(short, launcher) as job:
        job.start(of_rank={1: ["--delay", "0.05"]})
        job.wire.hold(lambda seen: len(job.wire.steps) > 1 and job.taps[1].taken() >= 10)
        assert job.wire.acked[1] == min(job.wire.acked.values())
        job.server.kill()
        job.taps[1].kill()
        job.lead_to(job.serve())
        job.wire.release()
        job.restart(job.checkpoint())
        job.finish()


def test_restarted_on_the_same_port(short: Truth, launcher: Launcher) -> None:
    """No relay stands between: the readers connect to the server itself."""
    server = launcher.serve(short.config)
    endpoint = server.endpoint
    taps = [launcher.tap(endpoint, rank, short.layout, "--delay", "0.01") for rank in short.digests]
    for tap in taps:
        tap.wait_taken(9)
    server.kill()
    server = launcher.serve(short.config, "--listen", endpoint)
    for tap in taps:
        assert tap.exit_code() == 0, tap.last_words()
    assert server.exit_code() == 0
    check_whole_run(short, taps)


def test_restarted_elsewhere_behind_a_name_of_the_file_system(short: Truth, launcher: Launcher, tmp_path: Path) -> None:
    """``ipc://``, with a symbolic link as the stable name: it is resolved anew at each connection."""
    name = tmp_path / "feed"

    def serve(socket: str) -> None:
        part = tmp_path / "part"
        part.symlink_to(tmp_path / socket)
        servers.append(launcher.serve(short.config, "--listen", f"ipc://{tmp_path / socket}"))
        assert servers[-1].endpoint
        part.replace(name)

    servers: list[RunningServer] = []
    serve("one")
    taps = [launcher.tap(f"ipc://{name}", rank, short.layout, "--delay", "0.01") for rank in short.digests]
    for tap in taps:
        tap.wait_taken(9)
    servers[0].kill()
    serve("two")
    for tap in taps:
        assert tap.exit_code() == 0, tap.last_words()
    assert servers[1].exit_code() == 0
    check_whole_run(short, taps)
