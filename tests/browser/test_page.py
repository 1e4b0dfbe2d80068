"""What a person sees of the status page, in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count, cycle
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from packhorse_service.monitoring.headline import with_headline
from packhorse_service.monitoring.status import Event, ServerStatus
from packhorse_service.protocol.diagnosis import Cause, ReaderState
from tests.browser.conftest import DEADLINE_MS, Show
from tests.harness import wait_until
from tests.service.monitoring.scripted_site import Page, Site, serving
from tests.service.monitoring.statuses import a_reader, a_stall, a_status, a_stream, statuses, with_stream

PHONE = 360
KEPT = "[...document.querySelectorAll('#cells > *, td, .tiles b')]"
DRAWN = "[...document.querySelectorAll('svg *, [style]')].map(element => element.outerHTML)"
NO_FIGURE = re.compile(r"\b(NaN|Infinity|undefined|null)\b")
HOSTILE = "</script><img src=x onerror='document.title=1'><b>docs"


@pytest.mark.parametrize("readers", [1, 4, 64, 1024])
def test_every_rank_has_a_cell_that_says_what_it_does(show: Show, readers: int) -> None:
    shown = show(a_status(readers))
    labels = shown.run("[...document.querySelectorAll('#cells .cell')].map(cell => cell.ariaLabel)")
    assert labels == [f"rank {r.rank}, {r.at}: {r.state}" for r in a_stream(readers).readers]
    assert shown.text("#headline h2") == "✓ training"
    assert shown.text("#sentence") == "step 1,204, 16.2 M tokens/s, useful fill 98.9%"
    assert shown.text("#age").startswith("as of ")


def test_figures_change_when_the_status_does_and_the_elements_stay(show: Show, site: Site) -> None:
    shown = show()
    shown.run(f"{KEPT}.forEach(element => element.kept = true)")
    readers = list(a_stream().readers)
    readers[2] = a_reader(2, state=ReaderState.WAITING, cause=Cause.LOADING, why="the next step waits", waits_s=7.0)
    site.say(with_stream(a_status(), step=1305, readers=tuple(readers)))
    shown.wait_for("#sentence", "step 1,305")
    assert "waiting 7.0 s: the next step waits" in shown.text("#notable")
    assert shown.run(f"{KEPT}.every(element => element.kept)")


def test_a_stall_is_said_in_words_and_the_rank_that_keeps_all_others_is_the_first(show: Show) -> None:
    shown = show(with_stream(a_status(1024), **a_stall(readers=1024)))
    assert shown.text("#word") == "stalled by a slow peer"
    assert "1,023 readers have waited for 12 s" in shown.text("#sentence")
    assert shown.text("#notable tbody tr:first-child td:last-child").startswith("! training: its training loop last")
    assert shown.text("#more") == "and 1,008 more"
    assert shown.text("#states") == "!\n1 keeps others\n‖\n1,023 waiting"
    assert shown.page.title() == "✕ stalled by a slow peer: train · Packhorse"


def test_it_says_so_when_the_server_is_gone_and_recovers_by_itself(show: Show, site: Site) -> None:
    shown = show()
    answer = site.pages.pop("/status.json")
    shown.wait_for("#word", "gone")
    shown.wait_for("#sentence", "the server has not answered for")
    assert "it said last: training" in shown.text("#sentence")
    assert shown.run("getComputedStyle(said).filter") == "grayscale(1)"
    site.pages["/status.json"] = answer
    shown.wait_for("#word", "training")
    assert not shown.run("document.body.classList.contains('gone')")


def test_a_server_that_is_started_again_is_found_again(browser: Any, site: Site) -> None:
    other = Site(dict(site.pages))
    with serving(other):
        page = browser.new_page()
        page.goto(other.url)
        page.locator("#word", has_text="training").wait_for(timeout=DEADLINE_MS)
    page.locator("#word", has_text="gone").wait_for(timeout=DEADLINE_MS)
    other.say(with_stream(a_status(), step=7))
    with serving(other):
        page.locator("#sentence", has_text="step 7,").wait_for(timeout=DEADLINE_MS)
        page.close()


def test_a_loop_that_does_not_turn_is_told_from_one_that_does(show: Show) -> None:
    shown = show(a_status(age_s=42.0))
    assert shown.text("#word") == "stuck"
    assert "the server's loop has not turned for 42 s" in shown.text("#sentence")


def test_what_names_say_is_text_and_never_runs(show: Show) -> None:
    source = replace(a_stream().sources[0], name=HOSTILE)
    reader = a_reader(0, at=HOSTILE, state=ReaderState.LOST, why=HOSTILE)
    status = with_stream(
        a_status(events=(Event(age_s=1, level=HOSTILE, text=HOSTILE),), endpoint=HOSTILE, version=HOSTILE),
        name=HOSTILE,
        sources=(source,),
        readers=(reader,),
        failure=HOSTILE,
        contract={HOSTILE: HOSTILE},
        derived={HOSTILE: HOSTILE},
        rejects={HOSTILE: 1},
        stalled_s={HOSTILE: 1.0},
    )
    shown = show(status)
    for place in ("#sources", "#notable", "#events", "#server", "#sentence", "#counts"):
        assert HOSTILE in shown.text(place)
    assert shown.run("document.images.length") == 0
    assert shown.page.title() == f"✕ failed: {HOSTILE} · Packhorse"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("readers", [1, 16, 1024])
def test_nothing_is_wider_than_a_phone(show: Show, readers: int, scheme: str) -> None:
    long = replace(a_stream().sources[0], name="a-name-without-any-place-to-break-it" * 4)
    status = with_stream(a_status(readers), sources=(long,), **a_stall(readers=readers)) if readers > 1 else a_status(1)
    shown = show(status, width=PHONE, scheme=scheme)
    shown.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert shown.overflow <= 0
    sizes = shown.run(
        "[...document.querySelectorAll('p, td, dd, li')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 14


def test_streams_have_tabs_that_keys_move_between_and_the_address_names_the_one_shown(show: Show, site: Site) -> None:
    streams = (a_stream(), a_stream(name="held out", **a_stall(Cause.LOADING)))
    shown = show(a_status(streams=streams))
    assert shown.text("[role=tab] >> nth=1") == "held out ✕ stalled by loading"
    shown.page.focus("[role=tab] >> nth=0")
    shown.page.keyboard.press("ArrowRight")
    assert shown.text("#word") == "stalled by loading"
    assert shown.page.url == f"{site.url}/#held%20out"
    shown.page.reload()
    shown.wait_for("#word", "stalled by loading")


def test_cells_give_details_to_a_pointer_a_finger_and_the_keyboard(show: Show) -> None:
    shown = show(a_status(64))
    shown.page.hover("#cells .cell >> nth=9")
    assert shown.text("#details").startswith("Rank 9, dp4·cp1·tp0·pp0: training. It takes step 1,204")
    shown.page.click("#cells .cell >> nth=5")
    shown.page.mouse.move(0, 0)
    assert shown.text("#details").startswith("Rank 5,")
    for key, rank in (("ArrowRight", 6), ("ArrowLeft", 5), ("Home", 0), ("End", 63), ("ArrowRight", 63)):
        shown.page.keyboard.press(key)
        assert shown.text("#details").startswith(f"Rank {rank},")
    assert shown.run("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1


def test_a_screen_reader_finds_headings_tables_and_what_changed(show: Show) -> None:
    shown = show(with_stream(a_status(), **a_stall()))
    assert shown.run("document.querySelectorAll('h1').length") == 1
    assert shown.page.get_by_role("status").text_content().startswith("stalled by a slow peer: the stream waits")
    sources = shown.page.get_by_role("table", name="Sources").get_by_role("columnheader")
    assert sources.all_text_contents() == [
        *("source", "share", "weight", "samples", "tokens", "epoch", "pending", "skipped", "over length"),
        "unsupervised",
    ]
    assert shown.page.get_by_role("listbox").get_by_role("option").count() == 4
    assert "Throughput over 5 min 0 s: 16.1 M now" in shown.page.get_by_role("img").first.get_attribute("aria-label")
    assert shown.run(UNNAMED) == []


UNNAMED = """[...document.querySelectorAll('main section:not(#tiles *), svg[role=img], table, details')]
  .filter((e) => !e.ariaLabel && !document.getElementById(e.getAttribute('aria-labelledby')))
  .filter((e) => !e.querySelector('summary'))
  .map((e) => e.outerHTML.slice(0, 80))"""

# Of each text, and of what is behind it: (contrast, element) where it is below what WCAG asks for.
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = (color) => rgb(color).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => { const color = getComputedStyle(element).backgroundColor;
    return rgb(color)[3] || !element.parentElement ? color : behind(element.parentElement); };
  return [...document.querySelectorAll('h1, h2, p, td, th, dt, dd, li, b, a, span, .cell')]
    .filter((e) => e.innerText?.trim())
    .map((e) => [light(getComputedStyle(e).color), light(behind(e)), e.outerHTML.slice(0, 80)])
    .map(([one, other, what]) => [(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), what])
    .filter(([contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_told_from_what_is_behind_it(show: Show, scheme: str) -> None:
    states = [a_reader(rank, 8, state=state) for rank, state in enumerate(ReaderState)]
    shown = show(with_stream(a_status(8), **a_stall() | {"readers": (*states, a_reader(7, 8))}), scheme=scheme)
    assert shown.run(CONTRAST) == []


def test_a_page_that_nobody_sees_asks_seldom_and_at_once_when_it_is_seen_again(show: Show, site: Site) -> None:
    shown = show(frozen=True)
    shown.run("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true })")
    site.say(with_stream(a_status(), step=2000))
    shown.page.clock.run_for(2100)  # the look that was due is taken
    shown.wait_for("#sentence", "step 2,000")
    asked = len(site.asked)
    shown.page.clock.run_for(25_000)
    assert len(site.asked) == asked
    site.say(with_stream(a_status(), step=3000))
    shown.run("delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))")
    shown.wait_for("#sentence", "step 3,000")


def test_lines_are_drawn_of_rates_of_whatever_size(show: Show) -> None:
    (stream,) = a_status().streams
    rates = cycle((0.0, 2e-311, 1.0, 1.7e308, 1.7e308, 5e-324))
    history = tuple(replace(point, tokens_per_s=next(rates)) for point in stream.history)
    shown = show(with_stream(a_status(), history=history))
    drawn = shown.run(DRAWN)
    assert len(drawn) > 4
    assert not [element for element in drawn if NO_FIGURE.search(element)]


@pytest.mark.parametrize("width", [PHONE, 1200])
def test_any_status_can_be_shown(show: Show, site: Site, width: int) -> None:
    shown = show(width=width)
    seen = count()

    @settings(max_examples=30)
    @given(statuses())
    def shows(status: ServerStatus) -> None:
        here = f"tcp://number-{next(seen)}"
        site.say(replace(with_headline(status), endpoint=here, version=a_status().version))
        shown.run("document.dispatchEvent(new Event('visibilitychange'))")
        shown.wait_for("#server", f"{here},")
        assert len(status.streams) < 2 or shown.page.locator("[role=tab]").count() == len(status.streams)
        assert shown.overflow <= 0
        assert not shown.complaints, "Chromium complains of what no element can have, such as a width below 0 or NaN"

    shows()


def test_a_status_that_cannot_be_shown_does_not_keep_the_page_from_the_next(browser: Any, site: Site) -> None:
    page = browser.new_page()
    thrown: list[str] = []
    page.on("pageerror", lambda error: thrown.append(str(error)))
    page.goto(site.url)
    page.locator("#word", has_text="training").wait_for(timeout=DEADLINE_MS)
    whole = msgspec.to_builtins(a_status())
    del whole["streams"][0]["history"]
    site.pages["/status.json"] = Page(msgspec.json.encode(whole))
    wait_until(lambda: bool(page.evaluate("1")) and bool(thrown), "a script that throws")
    site.say(with_stream(a_status(), step=2001))
    page.locator("#sentence", has_text="step 2,001").wait_for(timeout=DEADLINE_MS)
    page.close()
