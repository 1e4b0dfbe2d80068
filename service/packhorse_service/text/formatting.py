"""Numbers, sizes, durations and lists as short texts for people. Every float has one, and none raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite, isnan
from typing import TypeVar

from pydantic import ByteSize

__all__ = [
    "NAMES_SHOWN",
    "UNKNOWN",
    "and_more",
    "duration",
    "human_bytes",
    "mebibytes",
    "names",
    "names_listed",
    "percent",
    "plural_of",
    "pluralise",
    "rounded",
    "si",
]

T = TypeVar("T")

UNKNOWN = "not known"
INFINITE = "∞"
NAMES_SHOWN = 8  # of a list, in a sentence: its reader needs an example, and how many there are
MIB = 1 << 20
SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
LONG = 1e15  # from here on a number has so many digits that an exponent is easier to read
DAY_S = 86400
SPANS = ((DAY_S, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # two units from so many seconds on


def si(value: float | None) -> str:
    """Return about three digits and an SI prefix: 4.21 M. ``None`` and NaN are not known."""
    if value is None or not isfinite(value):
        return _without_digits(value)
    for scale, name in SCALES:
        if abs(value) >= scale:
            return f"{rounded(value / scale)} {name}"
    return rounded(value)


def rounded(value: float | None) -> str:
    """Return about three digits: 0.00436, 12.3, 1,234. ``None`` and NaN are not known."""
    if value is None or not isfinite(value):
        return _without_digits(value)
    size = abs(value)
    if size < 1 or size >= LONG:
        return f"{value:z.3g}"
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2}f}"


def mebibytes(size: float | None) -> str:
    """Return bytes as MiB or GiB. ``None`` and NaN are not known."""
    if size is None or not isfinite(size):
        return _without_digits(size)
    if abs(size) >= LONG:
        return f"{rounded(size / MIB / 1024)} GiB"
    return f"{size / MIB / 1024:,.2f} GiB" if size >= 1024 * MIB else f"{size / MIB:z,.0f} MiB"


def percent(share: float | None) -> str:
    """Return a share in percent: 12.3%. ``None`` and NaN are not known."""
    if share is None or not isfinite(share):
        return _without_digits(share)
    return f"{share:z.1%}" if abs(share) < LONG else f"{rounded(100 * share)}%"


def _without_digits(value: float | None) -> str:
    """Return the text of what is not finite."""
    if value is None or isnan(value):
        return UNKNOWN
    return INFINITE if value > 0 else f"-{INFINITE}"


def plural_of(thing: str) -> str:
    """Return the plural of the name of a thing: readers, micro-batches."""
    return f"{thing}es" if thing == "micro-batch" else f"{thing}s"


def pluralise(count: int, thing: str) -> str:
    """Return a count and what is counted: 1 reader, 2 readers."""
    return f"{count:,} {thing if count == 1 else plural_of(thing)}"


def duration(seconds: float) -> str:
    """Return a time in two units at most: 3.2 s, 12 s, 3 min 20 s, 2 d 4 h. NaN is not known."""
    if not isfinite(seconds):
        return _without_digits(seconds)
    if abs(seconds) >= LONG:
        return f"{rounded(seconds / DAY_S)} d"
    whole = round(seconds)
    for unit, name, smaller, smaller_name in SPANS:
        if whole >= unit:
            return f"{whole // unit:,} {name} {whole % unit // smaller} {smaller_name}"
    return f"{seconds:z.1f} s" if seconds < 9.95 else f"{whole} s"


def human_bytes(size: int) -> str:
    """Return bytes in the largest unit that leaves at least 1 of it: 1.5 GiB."""
    return ByteSize(size).human_readable(separator=" ")


def names(items: Iterable[T], limit: int = NAMES_SHOWN, *, say: Callable[[T], str] = str) -> str:
    """Return the first items and how many more there are, as a sentence has them: "a, b and 3 more"."""
    shown, more = _first(items, limit, say)
    return f"{', '.join(shown)} {and_more(more)}" if more else ", ".join(shown)


def names_listed(items: Iterable[T], limit: int = NAMES_SHOWN, *, say: Callable[[T], str] = str) -> list[str]:
    """Return the first items and, as the last entry, how many more there are: what ``names`` says, as a list."""
    shown, more = _first(items, limit, say)
    return [*shown, and_more(more)] if more else shown


def and_more(count: int, things: str = "") -> str:
    """Return how a list goes on that is not shown to its end: "and 1,020 more", "and 3 more samples"."""
    return f"and {count:,} more {things}".rstrip()


def _first(items: Iterable[T], limit: int, say: Callable[[T], str]) -> tuple[list[str], int]:
    """Return the first items in words, and the number of the others, for which no words are made."""
    every = items if isinstance(items, Sequence) else list(items)
    return list(map(say, every[:limit])), max(0, len(every) - limit)
