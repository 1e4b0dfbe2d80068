"""The pages of the documentation, and what they are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Block(NamedTuple):
    """A fenced block: the file that the line before it names, if any, its language, and its text."""

    file: str
    language: str
    text: str


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    found = re.findall(r"(?:^`([\w.-]+)`[^\n]*:\n\n)?^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(*parts) for parts in found]


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table behind a heading, without its head."""
    return _table(text, heading)[1:]


def grid(text: str, heading: str) -> dict[tuple[str, str], str]:
    """The same by the names of its rows and columns, which the first of each hold."""
    (_, *columns), *lines = _table(text, heading)
    return {(name, column): cell for name, *cells in lines for column, cell in zip(columns, cells, strict=True)}


def _table(text: str, heading: str) -> list[list[str]]:
    _, _, section = text.partition(f"\n{heading}\n")
    assert section, f"there is no {heading!r}"
    table = re.search(r"^(\|.*\n)\|[ -|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None, f"there is no table behind {heading!r}"
    lines = (line.replace(r"\|", "\0").strip().strip("|") for line in (table[1] + table[2]).splitlines())
    return [[cell.strip().replace("\0", "|") for cell in line.split("|")] for line in lines]
