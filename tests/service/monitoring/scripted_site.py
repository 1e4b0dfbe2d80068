"""A tiny monitor on loopback that says what a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from packhorse_service.monitoring.status import ServerStatus

__all__ = ["Page", "Site", "serving"]


@dataclass(frozen=True)
class Page:
    """One answer."""

    body: bytes
    kind: str = "application/json"
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Site:
    """Pages by path, which may be put there and taken away at any time, and what was asked for."""

    pages: dict[str, Page] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, status: ServerStatus) -> None:
        self.pages["/status.json"] = Page(msgspec.json.encode(status))


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve ``site`` while the block runs, on the port it had before where it had one."""
    with ThreadingHTTPServer(("127.0.0.1", site.port), partial(_Handler, site)) as server:
        site.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, site: Site, *args: object) -> None:
        self.site = site
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self.site.asked.append(self.path)
        page = self.site.pages.get(self.path, Page(b"not found", "text/plain", 404))
        self.send_response(page.code)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        for name, value in page.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, *_: object) -> None:
        """Nothing on the test's standard error."""
