"""Ask a running server for its status, over HTTP, with a deadline."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import msgspec

from packhorse import __version__
from packhorse.errors import ConfigError, ProtocolError, TransportError
from packhorse_service.config.addresses import BESIDE
from packhorse_service.monitoring.status import ServerStatus

__all__ = ["StatusAnswer", "ask", "status_url"]

PATH = "/status.json"
TIMEOUT_S = 5.0
MOST_BYTES = 64 << 20
CHUNK = 1 << 16
TAKES = "http://127.0.0.1:9555, HOST:PORT of the monitor, or the tcp://HOST:PORT that readers use"
WHERE = "serve prints the monitor's URL when it starts, and writes it to --monitor-file"

HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]@?#]+):(?P<port>[1-9]\d{0,4})")
URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """Answer of a server: its status, and the text that says it."""

    status: ServerStatus
    text: bytes  # JSON


def status_url(endpoint: str) -> str:
    """Return the URL of the status of the server at ``endpoint``. Raises ``ConfigError`` where that is unclear."""
    if URL.fullmatch(endpoint):
        return endpoint.removesuffix("/").removesuffix(PATH) + PATH
    tcp = endpoint.startswith("tcp://")
    found = HOST_PORT.fullmatch(endpoint.removeprefix("tcp://"))
    if found is None:
        raise ConfigError(f"ENDPOINT={endpoint!r} must be {TAKES}; {WHERE}")
    port = int(found["port"]) + BESIDE * tcp
    if port > LAST_PORT:
        raise ConfigError(f"ENDPOINT={endpoint!r} means port {port}, over {LAST_PORT}; {WHERE}")
    return f"http://{found['host']}:{port}{PATH}"


def ask(endpoint: str, timeout_s: float = TIMEOUT_S) -> StatusAnswer:
    """Return the status of the server at ``endpoint``.

    Raises ``ConfigError`` where ``endpoint`` is none, ``TransportError`` where nobody answers within ``timeout_s``
    seconds, and ``ProtocolError`` where something else than a monitor of this version does.
    """
    url = status_url(endpoint)
    text = _fetch(url, timeout_s)
    return StatusAnswer(_read(url, text), text)


def _fetch(url: str, timeout_s: float) -> bytes:
    opener = build_opener(ProxyHandler({}))  # a proxy knows another loopback
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return _body(url, response, time.monotonic() + timeout_s)
    except HTTPError as error:
        with error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it starts
                raise TransportError(f"{url} has no status: {_said(error)}; ask again") from error
            raise ProtocolError(f"{url} answers {error.code} {error.reason}: {_not_a_monitor()}") from error
    except URLError as error:
        raise _unreachable(url, error.reason, timeout_s) from error
    except (HTTPException, ConnectionError) as error:  # such as the greeting of a ZeroMQ socket
        raise ProtocolError(f"{url} does not speak HTTP: {_not_a_monitor()}") from error
    except TimeoutError as error:
        raise _unreachable(url, error, timeout_s) from error


def _said(error: HTTPError) -> str:
    """Return the first line of what came with an error."""
    said, *_ = error.read(CHUNK).decode(errors="replace").splitlines() or [""]
    return said or error.reason


def _body(url: str, response: HTTPResponse, deadline_s: float) -> bytes:
    parts, size = [], 0
    while part := response.read1(CHUNK):
        size += len(part)
        parts.append(part)
        if size > MOST_BYTES:
            raise ProtocolError(f"{url} says more than {MOST_BYTES >> 20} MiB: {_not_a_monitor()}")
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return b"".join(parts)


def _unreachable(url: str, reason: object, timeout_s: float) -> TransportError:
    if isinstance(reason, ConnectionRefusedError):
        return TransportError(
            f"nothing listens at {url}: the server does not run, or its monitor is elsewhere; {WHERE}"
        )
    if isinstance(reason, TimeoutError):
        return TransportError(f"{url} does not answer within {timeout_s:g} s: the host is cut off, or overloaded")
    return TransportError(f"{url} cannot be reached: {reason}; check host and port; {WHERE}")


def _read(url: str, text: bytes) -> ServerStatus:
    try:
        return msgspec.json.decode(text, type=ServerStatus)
    except msgspec.DecodeError as error:
        theirs = _version(text)
        if theirs is None:
            raise ProtocolError(f"{url} says no status: {_not_a_monitor()}") from error
        if theirs != __version__:
            other = f"{url} is of packhorse {theirs}, and this is {__version__}: use the server's version"
            raise ProtocolError(f"{other} ({error})") from error
        raise ProtocolError(f"{url} says a status that cannot be read: {error}") from error


def _version(text: bytes) -> str | None:
    """Return the version of the server that said this, if one did."""
    try:
        said: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    known = isinstance(said, dict) and "streams" in said and isinstance(said.get("version"), str)
    return said["version"] if known else None


def _not_a_monitor() -> str:
    return f"no packhorse monitor is there; {WHERE}"
