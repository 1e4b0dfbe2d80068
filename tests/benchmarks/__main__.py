"""All benchmarks: prints their tables, and writes them with the facts of the machine as Markdown.

    python -m tests.benchmarks [--quick] [--only NAME …] [--out FILE]

A full run takes half an hour and writes ``docs/benchmarks.md``; a shorter one writes where it is told to.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.table import Table

from tests.benchmarks.measuring import console, machine_table, markdown

# Each has tables(*, quick: bool) -> Iterator[Table], and can be run alone for its own options.
CHAPTERS = {
    "whole_path": "From shards to micro-batches",
    "transport": "Transport",
    "loading": "Loading",
    "packing": "Packing",
    "snapshots": "Snapshots",
    "memory": "Memory",
    "watching": "Being watched",
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

Written by `python -m tests.benchmarks`, which prints the same. Compare ratios within a table before figures between
machines: rows of one table are measured in turns, in one run.
"""
QUICK = "These are of a quick run (`--quick`): less data, fewer rows, one repeat.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer rows, no repeats: a few minutes")
    parser.add_argument("--only", nargs="+", choices=list(CHAPTERS), metavar="NAME", help=", ".join(CHAPTERS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="write Markdown here (a full run: docs/benchmarks.md)")
    asked = parser.parse_args()
    chosen = asked.only or list(CHAPTERS)
    out = asked.out or (None if asked.quick or asked.only else DOCUMENT)
    document = run(chosen, quick=asked.quick)
    if out is not None:
        out.write_text(document, encoding="utf-8")


def run(chosen: Sequence[str], *, quick: bool) -> str:
    """Print the tables of some benchmarks; the document of them."""
    screen, machine = console(), machine_table()
    screen.print(machine)
    parts = [INTRODUCTION, *([QUICK] if quick else []), markdown(machine)]
    for name in chosen:
        began = time.monotonic()
        module = import_module(f"tests.benchmarks.{name}")
        about, tables = str(module.__doc__).partition("\n")[0], []
        screen.rule(f"{CHAPTERS[name]}: {about}")
        for table in module.tables(quick=quick):
            screen.print(table)
            tables.append(table)
        parts.append(chapter(name, about, tables))
        screen.print(f"[dim]{name} took {time.monotonic() - began:.0f} s[/]")
    return "\n".join(parts)


def chapter(name: str, about: str, tables: Sequence[Table]) -> str:
    return "\n".join(
        [f"## {CHAPTERS[name]}", "", f"`python -m tests.benchmarks.{name}`: {about}", "", *map(markdown, tables)]
    )


if __name__ == "__main__":
    main()
