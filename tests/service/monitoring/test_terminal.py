"""What ``packhorse status`` shows of a status."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from packhorse_service.monitoring.status import Event, ServerStatus, StreamPhase
from packhorse_service.monitoring.terminal import headlines, render
from tests.service.monitoring.statuses import a_stall, a_status, a_stream, statuses, with_stream


def shown(status: ServerStatus, width: int = 80, *, terminal: bool = False) -> str:
    console = Console(width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    with console.capture() as captured:
        console.print(render(status))
    return captured.get()


@given(statuses(), st.integers(40, 200))
def test_any_status_can_be_shown_in_any_terminal(status: ServerStatus, width: int) -> None:
    lines = shown(status, width).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    assert all(character.isprintable() for line in lines for character in line)
    assert len(list(headlines(status))) == len(status.streams)


def test_a_screen_holds_what_an_operator_asks_for() -> None:
    text = shown(a_status())
    for part in (
        "train  training: step 1,204, 16.2 M tokens/s, useful fill 98.9%",
        "4: 1 receiving, 3 training",
        "dp1·cp1·tp0·pp0",
        "docs    74.8%   75.0%",
        "2/3 43%",
        "1,206 made, 1,204 delivered, 2 held",
        "4 by SEQ_LENGTH_MATCH",
        "12 s by startup",
        "12 s ago warning dp0·cp1·tp0·pp0: reconnected after 3.1 s",
    ):
        assert part in text
    assert len(text.splitlines()) <= 30


def test_of_many_readers_those_that_matter_are_shown_and_the_rest_counted() -> None:
    text = shown(with_stream(a_status(1024), **a_stall(readers=1024)))
    assert "stalled by a slow peer: the stream waits for dp0·cp1·tp0·pp0" in text
    assert "1,024: 1 training, 1,023 waiting" in text
    assert "and 1,020 more" in text
    assert len(text.splitlines()) <= 40


def test_a_server_whose_loop_stands_still_is_told_of() -> None:
    assert "the server's loop has not turned for 12 s" in shown(a_status(age_s=12.3))
    assert "turned" not in shown(a_status())


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_shown_as_they_are_and_never_obeyed(terminal: bool) -> None:
    name = "[red]docs[/] \x1b[2J\x07:smile:"
    source = replace(a_stream().sources[0], name=name)
    event = Event(age_s=1, level="error", text=name)
    text = shown(with_stream(a_status(events=(event,)), sources=(source,), failure=name), 160, terminal=terminal)
    assert text.count("[red]docs[/] \ufffd[2J\ufffd:smile:") == 3
    assert "\x1b[2J" not in text


def test_further_streams_are_below_the_first() -> None:
    status = a_status(streams=(a_stream(), a_stream(name="validation", phase=StreamPhase.ENDED)))
    text = shown(status)
    assert 0 < text.index("train  training") < text.index("validation  ended")
