"""The status over HTTP: a page, JSON, metrics and two probes, for the machine itself unless told otherwise.

A thread of its own answers, from the latest ``ServerStatus`` alone: nothing that is asked here can hold up the data.
It only ever reads, and shows no sample's content.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client.exposition import choose_encoder

from packhorse.errors import ConfigError
from packhorse_service.config.addresses import Address
from packhorse_service.monitoring.headline import with_headline
from packhorse_service.monitoring.prometheus import registry_of
from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.monitoring.status_page import page

__all__ = ["StatusServer"]

log = logging.getLogger("packhorse.monitor")

READ_S = 5.0  # for a request to arrive
AT_ONCE = 16  # requests; what is more waits
TURNS_WITHIN_S = 10.0  # the data loop, or it hangs
# What a browser calls this machine. Another name that leads here is a stranger's page, which wants to read (DNS
# rebinding).
OURS = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Answer of the server to one request."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


class StatusServer:
    """HTTP server bound to ``address``, in fact at ``url``; answers inside its ``with``. Its threads call ``latest``.

    Raises ``ConfigError`` where it cannot be bound.
    """

    def __init__(self, address: Address, latest: Callable[[], ServerStatus]) -> None:
        self._latest = latest
        self._private = OURS.fullmatch(str(address)) is not None
        self._registry = registry_of(latest)
        self._answers: dict[str, Callable[[str], HttpAnswer]] = {
            "/": lambda _accept: HttpAnswer(page(), "text/html; charset=utf-8"),
            "/status.json": self._status,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        self._server = _bound(address, self._answer)
        host, port = self._server.server_address[:2]
        self.url = f"http://{Address(str(host), int(port))}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="packhorse-monitor", daemon=True)

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request, as WSGI wants it."""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            answer = HttpAnswer(b"only GET\n", status=HTTPStatus.METHOD_NOT_ALLOWED)
        elif self._private and not OURS.fullmatch(environ.get("HTTP_HOST", "localhost")):
            answer = HttpAnswer(b"this is the monitor of this machine alone\n", status=HTTPStatus.MISDIRECTED_REQUEST)
        else:
            found = self._answers.get(environ["PATH_INFO"])
            answer = found(environ.get("HTTP_ACCEPT", "")) if found else _nothing(self._answers)
        headers = {**HEADERS, "Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        start_response(f"{answer.status.value} {answer.status.phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]

    def _status(self, _accept: str) -> HttpAnswer:
        return HttpAnswer(msgspec.json.encode(with_headline(self._latest())), "application/json")

    def _metrics(self, accept: str) -> HttpAnswer:
        encode, kind = choose_encoder(accept)
        return HttpAnswer(encode(self._registry), kind)

    def _healthz(self, _accept: str) -> HttpAnswer:
        """Answer whether the data loop turns.

        Who is connected does not matter: to kill the server would help nobody.
        """
        age_s = self._latest().age_s
        if age_s > TURNS_WITHIN_S:
            return _unavailable(f"the data loop last turned {age_s:.0f} s ago")
        return HttpAnswer(f"ok: the data loop last turned {age_s:.1f} s ago\n".encode())

    def _readyz(self, accept: str) -> HttpAnswer:
        """Answer whether a reader that comes now is served: the contract holds, and the first step is made."""
        status = self._latest()
        if not status.ready:
            failures = [stream.failure for stream in status.streams if stream.failure]
            return _unavailable(failures[0] if failures else "the first step is not made yet")
        return self._healthz(accept)


def _unavailable(why: str) -> HttpAnswer:
    return HttpAnswer(f"{why}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


def _nothing(answers: Iterable[str]) -> HttpAnswer:
    return HttpAnswer(f"nothing here; there are {' '.join(answers)}\n".encode(), status=HTTPStatus.NOT_FOUND)


# Listening ------------------------------------------------------------------------------------------------


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server with a thread for each request, at most ``AT_ONCE`` of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = AT_ONCE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        """Bind as ``WSGIServer`` does, but without asking the network what this machine is called."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log that whoever asked has gone, or said what is no HTTP: nobody is left to tell."""
        log.debug("a request from %s was broken off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes and scrapes come every few seconds and are no events."""


def _bound(address: Address, answer: Callable[..., Iterable[bytes]]) -> WSGIServer:
    kind = _Server6 if ":" in address.host else _Server
    make = partial(make_server, app=answer, server_class=kind, handler_class=_Handler)
    try:
        try:
            return make(address.host, address.port)
        except OSError:
            if not address.moves:
                raise
            return make(address.host, 0)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"monitor={str(address)!r}: {error}; end the process that uses it, name another HOST:PORT "
            "(port 0 takes a free one), or monitor: null for no status page and no metrics"
        ) from error
