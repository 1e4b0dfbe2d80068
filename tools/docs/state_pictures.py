"""Pictures of the protocol's state machines, drawn from their transition tables.

    FORMING ── HELLO ───▶ RESTORING, WELCOMING
            ── failed ──▶ FAILED
            ── BYE ────── stays

One line for each state and each set of states that it may be left for; an event may always leave the state as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TypeVar

__all__ = ["redrawn", "state_picture"]

S = TypeVar("S", bound=Enum)
E = TypeVar("E")
T = TypeVar("T")

STAYS = "stays"
DRAWN = re.compile(r"(?:^    [^\n]*──[^\n]*\n)+", re.MULTILINE)


def state_picture(states: type[S], next_states: Mapping[tuple[S, E], Iterable[S]], name_of: Callable[[E], str]) -> str:
    """Return the picture of a machine, a line for each group of events.

    ``next_states`` has for each (state, event) the states that the event may lead to; ``name_of`` names an event.
    States are drawn in the order of their enumeration, events in that of the table.
    """
    lines = [
        (state.name if first else "", ", ".join(events), targets)
        for state in states
        for first, (targets, events) in _first_marked(_grouped(states, state, next_states, name_of).items())
    ]
    left = max((len(state) for state, _, _ in lines), default=0)
    middle = max((len(events) for _, events, _ in lines), default=0)
    return "\n".join(_line(state.ljust(left), events, targets, middle) for state, events, targets in lines)


def _grouped(
    states: type[S], state: S, next_states: Mapping[tuple[S, E], Iterable[S]], name_of: Callable[[E], str]
) -> dict[str, list[str]]:
    """Return the names of the events of a state by where they may lead to; those that lead nowhere come last."""
    groups: dict[str, list[str]] = {}
    for (begin, event), targets in next_states.items():
        if begin is state:
            reached = set(targets)
            groups.setdefault(", ".join(other.name for other in states if other in reached), []).append(name_of(event))
    staying = groups.pop("", None)
    return groups | ({STAYS: staying} if staying else {})


def _first_marked(items: Iterable[T]) -> Iterator[tuple[bool, T]]:
    return ((number == 0, item) for number, item in enumerate(items))


def _line(state: str, events: str, targets: str, width: int) -> str:
    head = "─" if targets == STAYS else "▶"
    return f"{state} ── {events} {'─' * (width - len(events) + 2)}{head} {targets}"


def redrawn(source: str, picture: str) -> str:
    """Return the source of a module with the picture in its docstring drawn anew.

    The picture is the first block of lines there that are indented by four and hold a shaft (``──``).
    Raises ``ValueError`` where the docstring has none.
    """
    begin, quotes, rest = source.partition('"""')
    docstring, end, code = rest.partition('"""')
    indented = "".join(f"    {line}\n" for line in picture.splitlines())
    drawn, count = DRAWN.subn(lambda _: indented, docstring, count=1)
    if not count:
        raise ValueError("the docstring has no picture to draw anew: give it a line with ── indented by four")
    return f"{begin}{quotes}{drawn}{end}{code}"
