"""Tables of transitions, of which both halves of the protocol are made: (state, event) -> handler and next states.

An event is a type: of a message that arrived, or of something that happened on this side. What a table does not
list cannot happen: an event without a row is refused, and so is a state that its row does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["Table", "Transition", "rows_by_state"]

StateT = TypeVar("StateT", bound=Enum)


class Transition(NamedTuple, Generic[StateT]):
    """Row of a table of transitions."""

    handler: Callable[..., Any]  # its docstring says what is done, in the documentation too
    to: tuple[StateT, ...]  # the states it may lead to; its own among them, where it may stay


Table = Mapping[tuple[StateT, type], Transition[StateT]]


def rows_by_state(table: Table[StateT], states: type[StateT]) -> Mapping[StateT, Mapping[type, Transition[StateT]]]:
    """Return the rows of each state by their events: in a state, to find a row is to look up a type."""
    return {state: {event: row for (at, event), row in table.items() if at is state} for state in states}
