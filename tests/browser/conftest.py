"""A headless Chromium, pages of it that watch what the page does, and a site that serves the status page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.monitoring.status_page import page as status_page
from tests.service.monitoring.scripted_site import Page, Site, serving
from tests.service.monitoring.statuses import a_status

DEADLINE_MS = 20_000
NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without a display, a sandbox that containers refuse, and all that would call home.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def missing(what: str) -> NoReturn:
    """Skip; where all tests must run, fail."""
    reason = f"{what} is missing: make browser, and Debian's package chromium"
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests; each has contexts of its own."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("playwright")
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        missing("chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """The page as a server serves it, with the status of four ranks that train."""
    headers = {"Content-Security-Policy": POLICY}
    with serving(Site({"/": Page(status_page(), "text/html; charset=utf-8", headers=headers)})) as site:
        site.say(a_status())
        yield site


@dataclass
class Shown:
    """The page in a window, and what it did that it should not."""

    page: Any
    complaints: list[str] = field(default_factory=list)  # errors and warnings of the console, and of scripts
    hosts: set[str] = field(default_factory=set)  # that were asked for anything

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, selector: str, text: str) -> None:
        """Until an element says so."""
        self.page.locator(selector, has_text=text).first.wait_for(timeout=DEADLINE_MS)

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)

    @property
    def overflow(self) -> int:
        """Pixels by which it is wider than the window."""
        return int(self.run("document.documentElement.scrollWidth - innerWidth"))


Show = Callable[..., Shown]


@pytest.fixture
def show(browser: Any, site: Site) -> Iterator[Show]:
    """Opens the page in a new window, of a status where one is given; whatever it complains of fails the test."""
    opened: list[Shown] = []

    def opening(
        status: ServerStatus | None = None, *, width: int = 1200, scheme: str = "light", frozen: bool = False
    ) -> Shown:
        if status is not None:
            site.say(status)
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        shown = Shown(page)
        opened.append(shown)
        page.on("console", lambda message: shown.complaints.append(message.text))
        page.on("pageerror", lambda error: shown.complaints.append(str(error)))
        page.on("request", lambda request: shown.hosts.add(urlsplit(request.url).netloc))
        if frozen:
            page.clock.install()  # its timers wait for clock.run_for
        page.goto(site.url)
        page.locator("#tiles b").first.wait_for(state="attached", timeout=DEADLINE_MS)
        return shown

    yield opening
    for shown in opened:
        shown.page.context.close()
        assert not [each for each in shown.complaints if "Failed to load resource" not in each]
        assert shown.hosts <= {urlsplit(site.url).netloc, ""}  # data: has none
