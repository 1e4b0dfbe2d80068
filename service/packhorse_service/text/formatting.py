"""Figures for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
NAMES_SHOWN = 8  # of a list, in a sentence: its reader needs an example, and how many there are
MIB = 1 << 20
SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
SPANS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))  # two units from so many seconds on


def si(value: float | None) -> str:
    """Three figures and a scale: 4.21 M."""
    if value is None:
        return UNKNOWN
    for scale, name in SCALES:
        if abs(value) >= scale:
            return f"{rounded(value / scale)} {name}"
    return rounded(value)


def rounded(value: float | None) -> str:
    """About three figures, without exponents."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size < 1:
        return f"{value:.3g}"
    return f"{value:,.{0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2}f}"


def mebibytes(size: float | None) -> str:
    """Bytes as MiB or GiB."""
    if size is None:
        return UNKNOWN
    return f"{size / MIB / 1024:,.2f} GiB" if size >= 1024 * MIB else f"{size / MIB:,.0f} MiB"


def percent(share: float | None) -> str:
    """A share, in percent."""
    return UNKNOWN if share is None else f"{share:.1%}"


def plural_of(thing: str) -> str:
    return f"{thing}es" if thing == "micro-batch" else f"{thing}s"


def pluralise(count: int, thing: str) -> str:
    """1 reader, 2 readers."""
    return f"{count:,} {thing if count == 1 else plural_of(thing)}"


def duration(seconds: float) -> str:
    """Two units at most: 3.2 s, 12 s, 3 min 20 s, 2 d 4 h."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in SPANS:
        if whole >= unit:
            return f"{whole // unit:,} {name} {whole % unit // smaller} {smaller_name}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"


def human_bytes(size: int) -> str:
    """Bytes, for people."""
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
