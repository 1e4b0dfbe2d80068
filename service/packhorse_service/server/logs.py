"""Logs: one line an event on standard error, as text or as JSON, and what repeats itself said once a minute."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pythonjsonlogger.json import JsonFormatter

__all__ = ["EVENTS", "LogForm", "Repetitions", "TextFormatter", "log_to_stderr"]

EVENTS = "packhorse.events"  # a logger
REPEAT_S = 60.0
TEXTS_KNOWN = 256
# What every record has; all else was given by the one who logged.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "again"}


class LogForm(StrEnum):
    """Form of a line of the log."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """Formatter of time, level, logger, the event, and its fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s  %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        given = [f"{name}={_quoted(value)}" for name, value in vars(record).items() if name not in STANDARD]
        return "  ".join([text, *([" ".join(given)] if given else [])])


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text


class Repetitions(logging.Filter):
    """Filter that holds back a line logged within the last minute; the next one tells how often that was.

    Not so what happened (``EVENTS``): that a reader is lost twice in a minute is news twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: OrderedDict[tuple[str, str], _Said] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == EVENTS:
            return True
        text, now = record.getMessage(), record.relativeCreated / 1000
        said = self._said.get((record.name, text))
        if said is not None and 0 <= now - said.at_s < REPEAT_S:
            said.held_back += 1
            return False
        if said is not None and said.held_back:
            record.msg, record.args = f"{text} ({said.held_back} times more since)", ()
        self._said[record.name, text] = _Said(now)
        self._said.move_to_end((record.name, text))
        while len(self._said) > TEXTS_KNOWN:
            self._said.popitem(last=False)
        return True


@dataclass(slots=True)
class _Said:
    at_s: float
    held_back: int = 0


FORMATTERS: dict[LogForm, Callable[[], logging.Formatter]] = {
    LogForm.TEXT: TextFormatter,
    LogForm.JSON: lambda: JsonFormatter(
        "%(asctime)s %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S%z",
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "message": "event"},
    ),
}


def log_to_stderr(level: str, form: LogForm = LogForm.TEXT) -> None:
    """Have everything that is logged written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    handler.addFilter(Repetitions())
    logging.basicConfig(level=level.upper(), handlers=[handler])
