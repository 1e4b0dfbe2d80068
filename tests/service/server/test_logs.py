"""One line an event: with its fields, as text or JSON, and what repeats itself once a minute."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from packhorse_service.monitoring.recent_events import KEPT, RecentEvents
from packhorse_service.server.logs import EVENTS, FORMATTERS, REPEAT_S, TEXTS_KNOWN, LogForm, Repetitions


def record(text: str, *, at_s: float = 0.0, name: str = "packhorse.server", **fields: Any) -> logging.LogRecord:
    made: Mapping[str, Any] = {
        "msg": text,
        "name": name,
        "levelno": logging.WARNING,
        "levelname": "WARNING",
        "relativeCreated": at_s * 1000,
        **fields,
    }
    return logging.makeLogRecord(made)


def test_text_has_the_event_and_its_fields_on_one_line() -> None:
    line = FORMATTERS[LogForm.TEXT]().format(record("the attempt runs", attempt=2, why="all are here"))
    assert line.endswith("WARNING packhorse.server  the attempt runs  attempt=2 why='all are here'")
    assert "\n" not in line


def test_json_is_one_object_with_the_same() -> None:
    said = json.loads(FORMATTERS[LogForm.JSON]().format(record("the attempt runs", attempt=2)))
    assert said.pop("time")
    assert said == {"level": "WARNING", "logger": "packhorse.server", "event": "the attempt runs", "attempt": 2}


def test_a_line_that_is_said_again_within_a_minute_is_held_back_and_counted() -> None:
    repetitions = Repetitions()
    passed = [repetitions.filter(record("waits for rank 3", at_s=second)) for second in (0, 10, 20, 59)]
    assert passed == [True, False, False, False]
    later = record("waits for rank 3", at_s=REPEAT_S + 1)
    assert repetitions.filter(later)
    assert later.getMessage() == "waits for rank 3 (3 times more since)"
    assert repetitions.filter(record("waits for rank 4", at_s=20))


def test_what_happened_is_said_each_time() -> None:
    repetitions = Repetitions()
    assert all(repetitions.filter(record("lost rank 3", at_s=second, name=EVENTS)) for second in range(5))


def test_a_clock_that_is_set_back_holds_nothing_back_for_ever() -> None:
    repetitions = Repetitions()
    assert [repetitions.filter(record("x", at_s=second)) for second in (1e6, 5.0, 6.0)] == [True, True, False]


def test_what_was_said_is_remembered_of_few_lines_only() -> None:
    repetitions = Repetitions()
    for number in range(TEXTS_KNOWN + 1):
        repetitions.filter(record(f"line {number}"))
    assert repetitions.filter(record("line 0")), "it was forgotten"
    assert not repetitions.filter(record(f"line {TEXTS_KNOWN}"))


@pytest.fixture
def recent() -> RecentEvents:
    return RecentEvents(iter(range(10_000)).__next__)


def test_the_last_warnings_are_kept_the_last_first_with_their_age(recent: RecentEvents) -> None:
    log = logging.getLogger("packhorse.test")
    with recent.attached():
        log.warning("first")
        log.info("nobody needs this later")
        log.error("second: %s", "why")
    log.warning("after it has listened")
    assert [(event.age_s, event.level, event.text) for event in recent.events(100.0)] == [
        (99.0, "error", "second: why"),
        (100.0, "warning", "first"),
    ]


def test_no_more_are_kept_than_can_be_read(recent: RecentEvents) -> None:
    with recent.attached():
        for number in range(2 * KEPT):
            logging.getLogger("packhorse.test").warning("line %d", number)
    assert len(recent.events(0.0)) == KEPT
