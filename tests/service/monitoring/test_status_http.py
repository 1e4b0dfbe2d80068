"""The monitor over HTTP: what each path answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from packhorse.errors import ConfigError
from packhorse_service.config.addresses import AUTO, Address, address_of
from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.monitoring.status_http import AT_ONCE, StatusServer
from tests.harness import DEADLINE_S
from tests.service.monitoring.collected_stream import status_after

ANY = Address("127.0.0.1", 0)


@contextmanager
def monitor(status: ServerStatus, address: Address = ANY) -> Iterator[StatusServer]:
    with StatusServer(address, lambda: status) as serving:
        yield serving


def ask(at: StatusServer, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    with closing(http.client.HTTPConnection(at.url.removeprefix("http://"), timeout=DEADLINE_S)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.fixture(scope="module")
def status() -> ServerStatus:
    return status_after(steps=2)


def test_the_status_as_json_says_what_the_server_is_at(status: ServerStatus) -> None:
    with monitor(status) as at:
        code, headers, body = ask(at, "/status.json")
    assert (code, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    (stream,) = json.loads(body)["streams"]
    assert (stream["name"], stream["phase"], len(stream["readers"])) == ("train", "forming", 2)


def test_metrics_are_what_prometheus_reads(status: ServerStatus) -> None:
    with monitor(status) as at:
        _, headers, body = ask(at, "/metrics")
        _, openmetrics, ends = ask(at, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert openmetrics["Content-Type"].startswith("application/openmetrics-text")
    assert ends.endswith(b"# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert {"packhorse_tokens", "packhorse_fill_ratio", "process_open_fds"} <= families.keys()
    assert [sample.value for sample in families["packhorse_steps"].samples] == [status.streams[0].steps]
    assert all(family.documentation for family in families.values())


def test_health_is_that_the_data_loop_turns_and_readiness_that_a_step_is_made(status: ServerStatus) -> None:
    unready, hung = replace(status, ready=False), replace(status, age_s=60.0)
    codes = {}
    for name, shown in (("well", status), ("unready", unready), ("hung", hung)):
        with monitor(shown) as at:
            codes[name] = [ask(at, path)[0] for path in ("/healthz", "/readyz")]
    assert codes == {"well": [200, 200], "unready": [200, 503], "hung": [503, 503]}


def test_a_stream_that_failed_is_not_ready_and_says_why(status: ServerStatus) -> None:
    failed = replace(status.streams[0], failure="shard 'x.tar' is gone")
    with monitor(replace(status, ready=False, streams=(failed,))) as at:
        code, _, body = ask(at, "/readyz")
    assert (code, body) == (503, b"shard 'x.tar' is gone\n")


@pytest.mark.parametrize(("method", "path", "code"), [("GET", "/secret", 404), ("POST", "/", 405), ("HEAD", "/", 200)])
def test_there_is_nothing_to_change_and_nothing_else_to_see(
    status: ServerStatus, method: str, path: str, code: int
) -> None:
    with monitor(status) as at:
        found, _, body = ask(at, path, method)
    assert found == code
    assert b"/status.json" in body if code == 404 else not body or code == 405


def test_the_page_may_load_nothing_from_elsewhere_and_be_in_no_frame(status: ServerStatus) -> None:
    with monitor(status) as at:
        _, headers, _ = ask(at, "/")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy


def test_a_page_of_another_name_cannot_read_the_status_of_this_machine(status: ServerStatus) -> None:
    """A browser that was led here by a name of somebody else's says that name (DNS rebinding)."""
    with monitor(status) as at:
        codes = [
            ask(at, "/status.json", Host=host)[0] for host in ("evil.example", "localhost:1", "127.0.0.1", "[::1]")
        ]
    assert codes == [421, 200, 200, 200]


def test_connections_that_say_nothing_do_not_keep_others_from_their_answer(status: ServerStatus) -> None:
    with monitor(status) as at:
        host, _, port = at.url.removeprefix("http://").rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=DEADLINE_S) for _ in range(AT_ONCE - 1)]
        assert ask(at, "/healthz")[0] == 200
        for connection in silent:
            connection.close()


def test_a_taken_address_is_refused_by_name_and_the_default_moves_to_a_free_one(status: ServerStatus) -> None:
    with monitor(status) as at:
        port = int(at.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"monitor='127.0.0.1:{port}'.*monitor: null"):
            StatusServer(Address("127.0.0.1", port), lambda: status)
        with monitor(status, Address("127.0.0.1", port, moves=True)) as moved:
            assert moved.url != at.url


@pytest.mark.parametrize(
    ("monitored", "listen", "found"),
    [
        (AUTO, "tcp://127.0.0.1:5555", Address("127.0.0.1", 9555, moves=True)),
        (AUTO, "tcp://10.0.0.1:5555", Address("127.0.0.1", 9555, moves=True)),
        (AUTO, "tcp://127.0.0.1:*", Address("127.0.0.1", 0, moves=True)),
        (AUTO, "tcp://127.0.0.1:0", Address("127.0.0.1", 0, moves=True)),
        (AUTO, "tcp://127.0.0.1:65000", Address("127.0.0.1", 0, moves=True)),
        (AUTO, "ipc:///tmp/server", Address("127.0.0.1", 0, moves=True)),
        ("0.0.0.0:80", "ipc:///tmp/server", Address("0.0.0.0", 80)),
        ("[::1]:9555", "tcp://127.0.0.1:5555", Address("::1", 9555)),
        (None, "tcp://127.0.0.1:5555", None),
    ],
)
def test_where_the_monitor_is(monitored: str | None, listen: str, found: Address | None) -> None:
    assert address_of(monitored, listen) == found


@pytest.mark.parametrize(
    "text", ["9555", "localhost", "localhost:", "localhost:65536", "http://localhost:9555", "::1:80"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        address_of(text, "tcp://127.0.0.1:5555")
