"""The little Markdown that generated blocks are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["code", "either", "table"]

BAR = r"\|"  # within a cell


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(map(_line, [head, ["---"] * len(head), *rows]))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |\n"


def code(text: object) -> str:
    return f"`{text}`"


def either(choices: Sequence[str]) -> str:
    """One of these, in words."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
