"""What the loop was given is what the state counts, wherever an interrupt comes between taking and returning."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import packhorse
from packhorse import Feed, MicroBatch, StallTimeout
from packhorse.contract.position import Position
from tests.client.test_feed import WELCOME, ScriptedServer, batch, end, feed_from, saying

HERE = str(Path(packhorse.__file__).parent)
SOCKETS = ("dealer.py", "polling.py", "handshakes.py")  # made anew behind an interrupt: nothing is taken there
STEPS = 1000


class Interrupted(BaseException):
    """What a signal handler may raise at any moment."""


@cache
def interruptible(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which CPython looks for signals: behind calls, at entry and in loops."""
    instructions = list(dis.get_instructions(code))
    behind_calls = (after.offset for before, after in itertools.pairwise(instructions) if before.opname == "CALL")
    others = (each.offset for each in instructions if each.opname in ("RESUME", "JUMP_BACKWARD"))
    return frozenset((*behind_calls, *others))


@cache
def lines_of_with(code: CodeType) -> frozenset[int | None]:
    """Lines that release what they hold when they are left: no signal comes there, as nothing is called."""
    entered = (each for each in dis.get_instructions(code) if each.opname == "BEFORE_WITH")
    return frozenset(each.positions.lineno for each in entered if each.positions is not None)


class Interrupt:
    """Raises ``Interrupted`` at the moment ``number`` of a call, of all the moments at which a signal could."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(HERE) or name.endswith(SOCKETS):
            return None
        frame.f_trace_opcodes = True
        line = event == "line" and frame.f_lineno not in lines_of_with(frame.f_code)
        if line or (event == "opcode" and frame.f_lasti in interruptible(frame.f_code)):
            self.left -= 1
            if self.left < 0 and not self.raised:
                self.raised = True
                raise Interrupted
        return self


def at_every_moment(feed: Feed, ask: Callable[[], Any]) -> Iterator[Any]:
    """Ask again and again, interrupted one moment later each time, until there is none left: yield what was given."""
    for number in itertools.count():
        interrupt = Interrupt(number)
        before = feed.position
        sys.settrace(interrupt)
        try:
            got = ask()
        except Interrupted:
            sys.settrace(None)
            assert feed.position == before, f"interrupted at moment {number}: nothing was given"
            got = ask()
        finally:
            sys.settrace(None)
        yield got
        if not interrupt.raised:
            return


def stream(steps: int) -> list[Any]:
    return [WELCOME, *(batch(step, index) for step in range(steps) for index in range(2)), end(steps)]


def one_by_one(asked: Iterator[MicroBatch]) -> Callable[[], tuple[MicroBatch, ...]]:
    return lambda: (next(asked),)


def whole_steps(feed: Feed) -> Callable[[], tuple[MicroBatch, ...]]:
    steps = feed.steps()
    return lambda: next(steps)


WAYS: dict[str, Callable[[Feed], Callable[[], tuple[MicroBatch, ...]]]] = {
    "next": one_by_one,
    "for": lambda feed: one_by_one(iter(feed)),
    "steps": whole_steps,
    "chunk": lambda feed: one_by_one(feed.chunks(1)[0]),
}


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_interrupted_while_it_is_taken_is_given_next_and_counts_when_it_is(endpoint: str, way: str) -> None:
    with ScriptedServer(endpoint, saying(*stream(STEPS))), feed_from(endpoint, window=3000) as feed:
        given: list[MicroBatch] = [mb for got in at_every_moment(feed, WAYS[way](feed)) for mb in got]
        rest = list(feed)
    positions = [mb.position for mb in (*given, *rest)]
    assert positions == [Position(step, index) for step in range(STEPS) for index in range(2)]
    assert len(given) > 40, "there are that many moments"
    assert rest, "until there was no moment left"


def test_a_step_that_did_not_get_whole_counts_as_not_taken_and_its_micro_batches_are_given_later(endpoint: str) -> None:
    begun: list[Any] = [WELCOME, batch(0, 0), batch(0, 1), batch(1, 0)]
    with ScriptedServer(endpoint, saying(*begun)), feed_from(endpoint, stall_timeout=0.5) as feed:
        steps = feed.steps()
        assert [mb.position for mb in next(steps)] == [(0, 0), (0, 1)]
        with pytest.raises(StallTimeout):
            next(steps)
        assert feed.position == Position(1, 0)
        assert next(feed).position == Position(1, 0)
        assert feed.position == Position(1, 1)
