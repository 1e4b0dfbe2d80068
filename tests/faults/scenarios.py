"""Two runs that meet most of what can go wrong; also run on faulty copies of the code, which they must notice."""

from __future__ import annotations

from collections.abc import Callable

from packhorse.wire.messages import Batch, Hello
from tests.faults.job import Job
from tests.faults.oracle import check_served_right
from tests.faults.relay import Seen


def cut_then_killed(job: Job) -> None:
    """Connections are cut, then the server is killed, with a row on its way and ranks in different steps."""

    def apart(step: int) -> Callable[[Seen], bool]:
        return lambda seen: isinstance(seen.message, Batch) and len(job.wire.steps) > 1 and min(job.wire.steps) >= step

    job.start("--timeout", "6", of_rank={1: ["--delay", "0.02"]})
    job.wire.hold(apart(1))
    for relay in job.relays.values():
        relay.cut()
    job.wire.release()
    job.wire.hold(apart(4))
    job.replace_server(job.serve())
    job.wire.release()
    job.finish()


def one_rank_lags(job: Job) -> None:
    """One rank takes its time from the first step to the last, further behind than its window if nobody waits."""
    job.start("--timeout", "6", of_rank={1: ["--delay", "0.02"]})
    job.finish()


def zombie_of_an_older_attempt(job: Job) -> None:
    """One process outlives its job; when the server is killed it is the first to greet the next one."""
    job.start("--delay", "0.01")
    job.wait_taken(9)
    checkpoint = job.checkpoint()
    zombie, its_relay = job.leave_behind(0)
    its_relay.target = None  # out of reach: a server that it could ask would tell it that its attempt is over
    its_relay.cut()
    job.taps[1].kill()
    for turn in range(2):  # the job is restarted from the same checkpoint again and again
        job.start("--delay", "0.01", "--timeout", "12", "--resume", str(checkpoint))
        job.wait_taken(4)
        if turn == 0:
            for tap in job.taps:
                tap.kill()
    job.server.kill()
    server = job.serve()
    its_relay.target = server.endpoint
    job.wire.hold(lambda seen: isinstance(seen.message, Hello))
    job.wire.release()
    job.lead_to(server)
    for tap in job.taps:
        assert tap.exit_code() == 0, tap.last_words()
    assert zombie.alive
    zombie.kill()
    check_served_right(job.truth, [zombie])
    job.check()
