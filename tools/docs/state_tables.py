"""The states of the protocol's halves as their transition tables have them: a picture, and a table of what is done."""

from __future__ import annotations

import re
from enum import Enum
from inspect import getdoc
from typing import TypeVar

from packhorse.protocol import client_session
from packhorse.protocol.client_session import State
from packhorse.protocol.transition_table import Table, Transition
from packhorse.wire.messages import TAGS
from packhorse_service.protocol import stream_session
from packhorse_service.protocol.attempt import Phase
from tools.docs.markdown import table
from tools.docs.state_pictures import state_picture

__all__ = ["client_picture", "client_states", "event_name", "server_picture", "server_states"]

S = TypeVar("S", bound=Enum)

TAG_OF = {kind: tag for tag, kind in TAGS.items()}


def client_states() -> str:
    """Return picture and table of the client's half."""
    return f"```\n{client_picture()}\n```\n\n{transitions(State, client_session.TRANSITIONS)}"


def client_picture() -> str:
    """Return the picture of the client's half."""
    return transition_picture(State, client_session.TRANSITIONS)


def server_states() -> str:
    """Return picture and table of the server's half."""
    return f"```\n{server_picture()}\n```\n\n{transitions(Phase, stream_session.TRANSITIONS)}"


def server_picture() -> str:
    """Return the picture of the server's half."""
    return transition_picture(Phase, stream_session.TRANSITIONS)


def transition_picture(states: type[S], rows: Table[S]) -> str:
    """Return the picture of a table: what may lead from each state to another."""
    leaving = {(state, event): [to for to in row.to if to is not state] for (state, event), row in rows.items()}
    return state_picture(states, {key: others for key, others in leaving.items() if others}, event_name)


def transitions(states: type[S], rows: Table[S]) -> str:
    """Return a table of what is done: a line for each event, a column for each state in which anything can happen."""
    columns = [state for state in states if any(at is state for at, _ in rows)]
    events = sorted({event for _, event in rows}, key=_order)
    head = ["", *(state.name for state in columns)]
    cells = ([_cell(state, rows.get((state, event))) for state in columns] for event in events)
    return table(head, ([event_name(event), *line] for event, line in zip(events, cells, strict=True)))


def event_name(event: type) -> str:
    """Return the tag of a message, or what happens in words: ``HandedOut`` is "handed out"."""
    return TAG_OF.get(event) or re.sub(r"(?<!^)(?=[A-Z])", " ", event.__name__).lower()


def _order(event: type) -> tuple[bool, int, str]:
    """Sort messages as the protocol lists them, before what happens on this side."""
    known = list(TAGS.values())
    return event not in known, known.index(event) if event in known else 0, event.__name__


def _cell(state: S, row: Transition[S] | None) -> str:
    """Return what a row does, as its handler's docstring has it, and the other states that it may lead to."""
    if row is None:
        return ""
    done = (getdoc(row.handler) or "").splitlines()[0].rstrip(".").replace("``", "`")
    others = ", ".join(to.name for to in row.to if to is not state)
    return f"{done[0].lower()}{done[1:]}{f' → {others}' if others else ''}"
