"""What a connection may take of the server, with the test's clock."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.protocol.admission import ACCEPTED_AHEAD, Admission, Decision, Limits, Rate, TokenBucket
from packhorse_service.server.rlimit import BESIDE_CONNECTIONS
from tests.harness import DEADLINE_S

LIMITS = Limits.for_readers(4)


def admitted(*connections: int, now: float = 0.0, limits: Limits = LIMITS) -> Admission:
    admission = Admission(limits)
    for connection in connections:
        assert admission.opened(connection, now) is Decision.ADMIT
    return admission


def heard_until_closed(admission: Admission, connection: int, now: float, limit: int = 10_000) -> int:
    """How many messages at one moment are heard before the connection is closed."""
    for count in range(limit):
        if admission.admit(connection, b"peer", 60, now) is Decision.CLOSE:
            return count
    return limit


@given(
    burst=st.integers(1, 50),
    per_s=st.floats(0.1, 10),
    pauses=st.lists(st.floats(0, 10), max_size=80),
)
def test_a_bucket_gives_its_burst_and_its_rate_and_no_more(burst: int, per_s: float, pauses: list[float]) -> None:
    bucket, now, spent = TokenBucket(Rate(burst, per_s)), 0.0, 0
    for pause in pauses:
        now += pause
        spent += bucket.take(now)
        assert spent <= burst + now * per_s + 1e-6


def test_a_clock_that_stands_still_or_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(Rate(1, 1000.0), 10.0)
    assert bucket.take(10.0)
    assert not bucket.take(10.0)
    assert not bucket.take(3.0)


# Connections -----------------------------------------------------------------------------------------


def test_every_reader_may_connect_twice_at_once_and_some_beside() -> None:
    readers = 1024
    limits = Limits.for_readers(readers)
    admission = admitted(*range(2 * readers + 64), limits=limits)
    assert len(admission) == limits.connections
    assert admission.opened(1 << 20, 0.0) is Decision.CLOSE
    assert len(admission) == limits.connections


def test_a_connection_that_is_closed_makes_room() -> None:
    admission = admitted(*range(LIMITS.connections))
    admission.closed(7)
    assert admission.opened(7, 60.0) is Decision.ADMIT
    assert admission.opened(1000, 60.0) is Decision.CLOSE


def test_connections_that_come_and_go_too_fast_are_closed_and_later_ones_are_not() -> None:
    admission = Admission(LIMITS)
    decisions = []
    for _ in range(10 * LIMITS.connections):
        decisions.append(admission.opened(5, 0.0))
        admission.closed(5)
    assert decisions.count(Decision.ADMIT) == LIMITS.connections
    assert admission.opened(5, 60.0) is Decision.ADMIT


def test_a_number_that_comes_again_is_another_connection() -> None:
    """The end of the earlier one may not have been reported."""
    admission = admitted(5)
    admission.hello_accepted(5)
    assert heard_until_closed(admission, 5, 0.0) == LIMITS.messages.burst
    assert admission.opened(5, 1.0) is Decision.ADMIT
    assert admission.admit(5, b"another", 60, 1.0) is Decision.ADMIT
    assert admission.overdue(1.0 + 2 * LIMITS.handshake_timeout_s) == [5]


def test_whoever_says_no_valid_hello_in_time_is_closed_and_whoever_has_is_not() -> None:
    admission = admitted(1, 2, 3)
    admission.hello_accepted(2)
    admission.admit(3, b"chatty", 60, 1.0)
    assert admission.overdue(LIMITS.handshake_timeout_s) == []
    assert admission.overdue(LIMITS.handshake_timeout_s + 0.1) == [1, 3]
    assert admission.overdue(LIMITS.handshake_timeout_s + 0.2) == []
    assert len(admission) == 1


# Messages --------------------------------------------------------------------------------------------


def test_a_reader_that_answers_everything_and_keeps_alive_is_heard_for_ever() -> None:
    admission = admitted(1)
    now = 0.0
    for sent in range(200_000):
        now += 1e-5  # 100,000 micro-batches a second, each acknowledged
        admission.credit(b"peer")
        assert admission.admit(1, b"peer", 60, now) is Decision.ADMIT, sent
    for second in range(1000):
        assert admission.admit(1, b"peer", 60, now + second) is Decision.ADMIT


def test_whoever_says_far_more_than_it_is_sent_is_closed_and_what_it_said_before_is_not_looked_at() -> None:
    admission = admitted(1, 2)
    assert heard_until_closed(admission, 1, 0.0) == LIMITS.messages.burst
    assert admission.admit(1, b"peer", 60, 0.0) is Decision.IGNORE
    assert admission.admit(2, b"other", 60, 0.0) is Decision.ADMIT


def test_a_reader_that_has_left_is_heard_to_the_end() -> None:
    """Its BYE may still wait to be read when the end of its connection is reported."""
    admission = admitted(1)
    admission.closed(1)
    assert admission.admit(1, b"peer", 60, 1.0) is Decision.ADMIT


def test_bytes_that_become_no_message_close_a_connection_whether_it_has_greeted_or_not() -> None:
    for hello_accepted in (False, True):
        admission = admitted(1, 2)
        admission.admit(1, b"peer", 500, 0.0)
        if hello_accepted:
            admission.hello_accepted(1)
        assert admission.received(1, 600) is Decision.ADMIT
        assert admission.received(1, 600 + LIMITS.unparsed_bytes) is Decision.ADMIT
        assert admission.received(1, 601 + 2 * LIMITS.unparsed_bytes) is Decision.CLOSE
        assert admission.admit(1, b"peer", 1, 0.0) is Decision.IGNORE
        assert admission.admit(2, b"other", 1, 0.0) is Decision.ADMIT


def test_what_is_read_is_no_stuffing_however_much_it_is() -> None:
    admission, bytes_received = admitted(1), 0
    for second in range(1000):
        admission.admit(1, b"peer", 80_000, float(second))
        bytes_received += 80_100
        assert admission.received(1, bytes_received) is Decision.ADMIT


def test_strangers_are_looked_at_often_and_readers_in_turn() -> None:
    limits = Limits.for_readers(500)
    admission = admitted(*range(503), limits=limits)
    for reader in range(500):
        admission.hello_accepted(reader)
    seen: dict[int, int] = dict.fromkeys(range(503), 0)
    for look in range(100, 100 + 300):
        for connection in admission.to_audit(look * 0.0101):
            seen[connection] += 1
    assert min(seen[connection_] for connection_ in (500, 501, 502)) >= 290
    assert min(seen[reader] for reader in range(500)) >= 2


def test_what_another_connection_is_sent_earns_nothing() -> None:
    admission = admitted(1, 2)
    admission.admit(1, b"one", 60, 0.0)
    admission.admit(2, b"two", 60, 0.0)
    for _ in range(1000):
        admission.credit(b"two")
    assert heard_until_closed(admission, 1, 0.0) < LIMITS.messages.burst


def test_hellos_are_few_and_one_reader_may_still_say_it_twice_a_minute_for_ever() -> None:
    admission = admitted(1, 2)
    said = [admission.admit_hello(1, 0.0) for _ in range(100)]
    assert said.count(Decision.ADMIT) >= LIMITS.hellos.burst
    assert Decision.CLOSE in said
    assert all(admission.admit_hello(2, 30.0 * minute) is Decision.ADMIT for minute in range(1000))


def test_offences_are_answered_a_while_and_then_close_the_connection() -> None:
    admission = admitted(1)
    answered = 0
    while admission.allow_error(1, 0.0) is Decision.ADMIT:
        answered += 1
    assert answered == LIMITS.protocol_errors.burst
    assert len(admission) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["opened", "closed", "admit", "admit_hello", "allow_error", "overdue", "to_audit"]),
            st.integers(0, 9),
        ),
        max_size=200,
    )
)
def test_nothing_that_happens_keeps_more_than_the_connections_that_are_open(events: list[tuple[str, int]]) -> None:
    limits = Limits(connections=4, new_connections=Rate(50, 1.0), messages=Rate(3, 0.1))
    admission = Admission(limits)
    for number, (event, connection) in enumerate(events):
        now = 0.5 * number
        match event:
            case "closed":
                admission.closed(connection)
            case "overdue" | "to_audit":
                getattr(admission, event)(now)
            case "admit":
                admission.admit(connection, b"peer %d" % connection, 60, now)
            case _:
                getattr(admission, event)(connection, now)
        assert len(admission) <= limits.connections
        assert len(admission._by_peer) <= len(admission)
        assert admission.audits.unauthenticated.keys() <= admission._open.keys()


def test_the_log_has_a_line_now_and_then_however_many_are_closed() -> None:
    admission, lines = Admission(LIMITS), 0
    for tenth in range(1000):
        for connection in range(200):
            admission.opened(connection, tenth / 10)
        lines += admission.closures.report(tenth / 10) is not None
    assert 5 <= lines <= 11
    assert sum(admission.allow_log_line(0.1) for _ in range(1000)) == LIMITS.log_lines.burst


# Open files ------------------------------------------------------------------------------------------


def limits_after(soft: int, hard: int, connections: int) -> str:
    """The limit of a process that had these and needs so many connections, or what it was told."""
    script = (
        "import resource\n"
        "from packhorse.errors import ConfigError\n"
        "from packhorse_service.server.rlimit import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "try:\n"
        f"    allowed = allow_open_files({connections}, ahead={ACCEPTED_AHEAD})\n"
        "    print(allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    return done.stdout.strip()


def test_a_limit_of_open_files_that_is_too_low_is_raised_as_far_as_it_goes() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this machine allows few open files")
    wanted = 100 + BESIDE_CONNECTIONS + ACCEPTED_AHEAD
    assert limits_after(64, 200, 100) == "200 200"
    assert limits_after(64, 4096, 100) == f"{min(4096, wanted)} {min(4096, wanted)}"


def test_a_limit_that_cannot_be_raised_is_refused_with_the_number_to_set() -> None:
    said = limits_after(100, 163, 100)
    assert "100 connections need a limit of 164" in said
    assert "cannot be raised above 163" in said
    for remedy in ("LimitNOFILE=164", "ulimit -n 164", "nofile=164"):
        assert remedy in said
