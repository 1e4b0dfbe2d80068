"""Two servers of one stream, and processes of jobs that are over: nobody is served wrong data, everyone is told."""

from __future__ import annotations

import signal

from tests.faults.job import Job
from tests.faults.scenarios import zombie_of_an_older_attempt


def test_half_of_the_ranks_led_to_another_server_meet_there_again(job: Job) -> None:
    """The first hears nothing from one rank for a while and sends the other to where the name points by then."""
    first, second = job.server, job.serve()
    assert second.endpoint
    job.start("--delay", "0.02")
    job.wait_taken(9)
    for relay in job.relays.values():
        relay.target = second.endpoint
    job.relays[1].cut()
    job.server = second
    job.finish()
    first.signal(signal.SIGTERM)
    first.exit_code(5)


def test_half_of_the_ranks_on_each_of_two_servers_are_refused_with_who_is_missing(job: Job) -> None:
    job.relays[1].target = job.serve().endpoint
    job.start("--timeout", "4")
    for tap, other in zip(job.taps, (1, 0), strict=True):
        assert tap.exit_code() == 1
        assert f"readers is without rank {other}" in tap.last_words()
        assert not tap.taken()


def test_a_restart_loop_from_one_checkpoint_with_a_zombie_of_the_first_attempt(job: Job) -> None:
    """The zombie is handed nothing of another attempt, and stops nobody, also where the server is replaced."""
    zombie_of_an_older_attempt(job)
