"""Pictures of state machines: every row of a table is drawn, and a module's docstring is drawn anew."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from tools.docs.state_pictures import redrawn, state_picture


class Door(Enum):
    OPEN = auto()
    SHUT = auto()
    BRICKED_UP = auto()


NEXT = {
    (Door.OPEN, "push"): [Door.SHUT],
    (Door.OPEN, "knock"): [],
    (Door.OPEN, "wind"): [Door.SHUT],
    (Door.SHUT, "build"): [Door.BRICKED_UP, Door.OPEN],
    (Door.BRICKED_UP, "knock"): [],
}
PICTURE = """\
OPEN       ── push, wind ──▶ SHUT
           ── knock ──────── stays
SHUT       ── build ───────▶ OPEN, BRICKED_UP
BRICKED_UP ── knock ──────── stays"""


def test_every_row_is_drawn_once_grouped_by_where_it_may_lead_to() -> None:
    assert state_picture(Door, NEXT, str) == PICTURE


def test_the_picture_in_a_docstring_is_drawn_anew_and_nothing_else_changes() -> None:
    module = (
        '"""A door.\n\n    OPEN ── push ──▶ NOWHERE\n           ── knock ── stays\n\nWood.\n"""\n\nX = "    a ── b"\n'
    )
    drawn = redrawn(module, PICTURE)
    assert drawn.startswith('"""A door.\n\n    OPEN       ── push, wind')
    assert drawn.endswith('stays\n\nWood.\n"""\n\nX = "    a ── b"\n')
    assert redrawn(drawn, PICTURE) == drawn


def test_a_docstring_without_a_picture_is_an_error() -> None:
    with pytest.raises(ValueError, match="no picture"):
        redrawn('"""A door."""\n', PICTURE)
