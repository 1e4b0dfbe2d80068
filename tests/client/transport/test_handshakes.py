"""Which failed handshakes are an error of keys, and which are a server that is not there yet."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from packhorse import AuthenticationFailed, Feed, TransportError
from packhorse.transport.handshakes import CLOSED_LIMIT, Handshakes
from packhorse.transport.key_files import ClientKey, find_client_key
from packhorse.transport.zmtp_probe import mechanism_of
from tests.harness import DEADLINE_S, wait_until
from tests.keys_on_disk import make_keys

KEY = ClientKey(Path("keys/trainers.key"), b"p" * 40, b"s" * 40, b"x" * 40)
CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE


def handshakes(key: ClientKey | None, announced: str | None) -> Handshakes:
    return Handshakes("tcp://host:1", key, ask=lambda endpoint: announced)


# Judging ---------------------------------------------------------------------------------------------


def close(judged: Handshakes, times: int = CLOSED_LIMIT) -> None:
    """The peer closes so many handshakes in a row."""
    for _ in range(times):
        judged.observe(*CLOSED)


def test_closed_handshakes_tell_of_keys_where_the_server_announces_another_mechanism() -> None:
    with pytest.raises(AuthenticationFailed, match="takes clients with a key only, and this one has no key"):
        close(handshakes(None, "CURVE"), 1)
    with pytest.raises(AuthenticationFailed, match=r"the server has no key, and 'keys/trainers.key' allows"):
        close(handshakes(KEY, "NULL"), 1)


def test_the_server_holds_another_key_where_it_encrypts_and_closes_handshakes_in_a_row() -> None:
    judged = handshakes(KEY, "CURVE")
    for _ in range(3):
        close(judged, CLOSED_LIMIT - 1)
        judged.observe(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
    with pytest.raises(AuthenticationFailed, match="wrong server key"):
        close(judged)


def test_a_server_that_closes_at_random_what_comes_too_fast_is_not_taken_for_another() -> None:
    answers = itertools.cycle(["CURVE"] * (CLOSED_LIMIT - 1) + [None])
    judged = Handshakes("tcp://host:1", KEY, ask=lambda endpoint: next(answers))
    close(judged, 10 * CLOSED_LIMIT)
    assert judged.trouble, "it goes on trying, and says why"


@pytest.mark.parametrize("key", [KEY, None], ids=["a key", "no key"])
def test_what_does_not_speak_the_protocol_is_no_matter_of_keys_however_often_it_closes(key: ClientKey | None) -> None:
    judged = handshakes(key, None)
    close(judged, 100)
    assert "does not speak ZeroMQ's protocol" in judged.trouble


def test_a_server_without_keys_may_close_a_client_without_one_as_often_as_it_likes_and_is_asked_once() -> None:
    asked: list[str] = []

    def ask(endpoint: str) -> str:
        asked.append(endpoint)
        return "NULL"

    close(Handshakes("tcp://host:1", None, ask), 100)
    assert asked == ["tcp://host:1"]


def test_a_server_that_says_nothing_is_not_asked_and_its_keys_are_not_judged() -> None:
    judged = handshakes(KEY, "NULL")
    for _ in range(100):
        judged.observe(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN)
    assert "says nothing" in judged.trouble


def test_zeromqs_own_verdicts_are_taken() -> None:
    with pytest.raises(AuthenticationFailed, match=r"does not know the key of 'keys/trainers\.key'"):
        handshakes(KEY, None).observe(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    mismatch = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
    with pytest.raises(AuthenticationFailed, match="no key"):
        handshakes(None, None).observe(*mismatch)
    with pytest.raises(TransportError, match="breaks ZeroMQ's protocol"):
        handshakes(None, None).observe(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_UNEXPECTED_COMMAND)


def test_no_message_shows_the_secret() -> None:
    for announced, event in (("NULL", CLOSED), ("CURVE", CLOSED), (None, (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400))):
        judged = handshakes(KEY, announced)
        judged._closed = CLOSED_LIMIT - 1
        with pytest.raises(AuthenticationFailed) as failed:
            judged.observe(*event)
        assert KEY.secret.decode() not in str(failed.value)


# Asking ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def router(listen: str, *, curve: bool) -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.ipv6 = "[" in listen
        if curve:
            bound.curve_server = True
            bound.curve_secretkey = zmq.curve_keypair()[1]
        bound.bind(listen)
        yield bound.getsockopt_string(zmq.LAST_ENDPOINT)


class Listener:
    """Another program: it says ``answer`` to whoever connects, and closes."""

    def __init__(self, answer: bytes) -> None:
        self.connections = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # of a client that has gone, or of the end
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    self.connections += 1
                    connection.sendall(self._answer)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://{}/socket", "ipc://@{}"])
@pytest.mark.parametrize(("curve", "mechanism"), [(True, "CURVE"), (False, "NULL")])
def test_a_server_announces_its_mechanism(listen: str, curve: bool, mechanism: str, tmp_path: Path) -> None:
    with router(listen.format(tmp_path), curve=curve) as endpoint:
        assert mechanism_of(endpoint) == mechanism


@pytest.mark.parametrize("answer", [b"", HTTP, b"\xff" + bytes(8) + b"\x7f"])
def test_another_program_announces_none(answer: bytes) -> None:
    with Listener(answer) as other:
        assert mechanism_of(other.endpoint) is None


def test_nobody_announces_none(tmp_path: Path) -> None:
    for endpoint in (f"ipc://{tmp_path}/nothing", "tcp://127.0.0.1:1", "tcp://no..name:1", "tcp://name.invalid:1"):
        assert mechanism_of(endpoint) is None


# A feed ----------------------------------------------------------------------------------------------


def test_a_feed_with_a_key_hears_within_seconds_that_the_server_has_none(tmp_path: Path) -> None:
    key_file = make_keys(tmp_path / "keys") / "trainers.key"
    with router("tcp://127.0.0.1:*", curve=False) as endpoint:
        feed = Feed(endpoint, key_file=key_file, start_timeout=5.0, arrays="numpy")
        with pytest.raises(AuthenticationFailed, match="the server has no key"), feed:
            next(feed)


@pytest.mark.parametrize("answer", [b"", HTTP], ids=["closes", "http"])
def test_a_feed_goes_on_trying_where_another_program_listens(answer: bytes, tmp_path: Path) -> None:
    """Even where ZeroMQ has given up: at what is no greeting it does, without a word."""
    key_file = make_keys(tmp_path / "keys") / "trainers.key"
    with Listener(answer) as other:
        feed = Feed(other.endpoint, key_file=key_file, start_timeout=DEADLINE_S, arrays="numpy")
        feed._connection.session.progress.keep_alive_s = 0.05
        wait_until(lambda: other.connections > 12, "tries")
        assert feed._connection.queue.error is None
        feed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


def test_the_key_of_a_feed_is_the_one_it_read(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys", one="0", two="1")
    one, two = (find_client_key(keys / f"{name}.key") for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert one.server == two.server
    assert one.public != two.public
