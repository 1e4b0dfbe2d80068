"""Asking a server for its status, and what is said where none answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse import ConfigError, ProtocolError, TransportError
from packhorse_service.config.addresses import BESIDE
from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.monitoring.status_client import ask, status_url
from tests.service.monitoring.scripted_site import Page, Site, serving
from tests.service.monitoring.statuses import a_status, statuses


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:9555", "http://127.0.0.1:9555/status.json"),
        ("http://127.0.0.1:9555/", "http://127.0.0.1:9555/status.json"),
        ("http://127.0.0.1:9555/status.json", "http://127.0.0.1:9555/status.json"),
        ("https://gateway/packhorse", "https://gateway/packhorse/status.json"),
        ("feeder:9555", "http://feeder:9555/status.json"),
        ("[::1]:9555", "http://[::1]:9555/status.json"),
        ("tcp://10.0.0.7:5555", "http://10.0.0.7:9555/status.json"),
        ("tcp://[fe80::1]:5555", "http://[fe80::1]:9555/status.json"),
    ],
)
def test_where_the_status_is_follows_from_the_endpoint(endpoint: str, url: str) -> None:
    assert status_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["", "feeder", "ipc:///run/feed", "tcp://h:0", "tcp://h:61536", "h:99999", "a b:1"]
)
def test_an_endpoint_that_has_no_monitor_is_refused_with_what_would_do(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--monitor-file") as error:
        status_url(endpoint)
    assert repr(endpoint) in str(error.value)


@settings(max_examples=20)
@given(statuses(finite=True))
def test_what_a_server_says_arrives(status: ServerStatus) -> None:
    with serving(Site()) as site:
        site.say(status)
        assert ask(site.url).status == status
        assert ask(f"tcp://127.0.0.1:{site.port - BESIDE}").status == status


def test_a_proxy_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with serving(Site()) as site:
        site.say(a_status())
        assert ask(site.url).status == a_status()


def test_where_nothing_listens_it_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match=r"nothing listens at http://127.0.0.1:\d+/status.json"):
            ask(f"127.0.0.1:{unused.getsockname()[1]}")


def test_a_host_that_is_not_known_is_named() -> None:
    with pytest.raises(TransportError, match=r"http://nowhere\.invalid:9555/status\.json cannot be reached"):
        ask("nowhere.invalid:9555")


@contextmanager
def speaking(said: bytes, *, again: bool = False) -> Iterator[str]:
    """The endpoint of somebody who says this to whoever connects, and says nothing else, or it again and again."""
    over = threading.Event()

    def speak() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(said)
            while not over.wait(0.02):
                if again:
                    connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


def test_a_server_that_is_silent_has_a_deadline() -> None:
    with speaking(b"") as endpoint, pytest.raises(TransportError, match=r"does not answer within 0\.2 s"):
        ask(endpoint, timeout_s=0.2)


def test_a_server_that_never_ends_what_it_says_has_a_deadline() -> None:
    with (
        speaking(b"HTTP/1.0 200 OK\r\n\r\n{", again=True) as endpoint,
        pytest.raises(TransportError, match=r"does not answer within 0\.2 s"),
    ):
        ask(endpoint, timeout_s=0.2)


def test_the_socket_of_the_readers_is_told_from_a_monitor() -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48 + b"\n"
    with speaking(greeting) as endpoint, pytest.raises(ProtocolError, match="no packhorse monitor is there"):
        ask(endpoint)


@pytest.mark.parametrize(
    "page",
    [
        Page(b"<html>", "text/html"),
        Page(b"{}"),
        Page(b"[1, 2]"),
        Page(b'"' + b"\xff" * 9 + b'"'),
        Page(b"gone", code=500),
    ],
)
def test_something_else_than_a_monitor_is_told(page: Page) -> None:
    with serving(Site({"/status.json": page})) as site:
        with pytest.raises(ProtocolError, match="no packhorse monitor is there") as error:
            ask(site.url)
        assert site.url in str(error.value)


@settings(max_examples=30)
@given(st.binary(max_size=100))
def test_whatever_is_said_is_read_or_refused(said: bytes) -> None:
    with serving(Site({"/status.json": Page(said)})) as site, pytest.raises(ProtocolError):
        ask(site.url)


def test_a_server_that_has_no_status_yet_is_told_from_none() -> None:
    page = Page(b"the data loop has not turned yet\n", "text/plain", 503)
    with (
        serving(Site({"/status.json": page})) as site,
        pytest.raises(TransportError, match="has no status: the data loop has not turned yet; ask again"),
    ):
        ask(site.url)


def test_a_server_of_another_version_is_named() -> None:
    described = msgspec.to_builtins(a_status()) | {"version": "7.1.0"}
    with serving(Site()) as site:
        site.pages["/status.json"] = Page(msgspec.json.encode(described | {"news": 1}))
        assert ask(site.url).status.version == "7.1.0"  # what was added since does no harm
        del described["connections"]
        site.pages["/status.json"] = Page(msgspec.json.encode(described))
        with pytest.raises(ProtocolError, match=r"is of packhorse 7\.1\.0, and this is .*: use the server's version"):
            ask(site.url)
