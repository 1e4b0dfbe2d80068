"""Figures for people."""

from __future__ import annotations

__all__ = ["UNKNOWN", "figure", "mebibytes", "number", "percent"]

UNKNOWN = "not known"
MIB = 1 << 20
SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None) -> str:
    """Three figures and a scale: 4.21 M."""
    if value is None:
        return UNKNOWN
    for scale, name in SCALES:
        if abs(value) >= scale:
            return f"{figure(value / scale)} {name}"
    return figure(value)


def figure(value: float | None) -> str:
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
