"""Phases are entered through one function, which the table of transitions rules."""

from __future__ import annotations

import re

import pytest

from packhorse_service.protocol import effects
from packhorse_service.protocol.attempt import Attempt, Phase, PhaseRefused
from packhorse_service.protocol.effects import (
    ConnectionLost,
    Made,
    NotMade,
    NotRestored,
    Restored,
    StreamFailed,
    TimePassed,
)
from packhorse_service.protocol.stream_session import TRANSITIONS
from tests.protocol.network import stream_spec

INTERNAL = (Made, NotMade, Restored, NotRestored, StreamFailed, TimePassed, ConnectionLost)


def test_a_phase_that_the_row_does_not_name_is_refused_and_nothing_changes() -> None:
    attempt = Attempt(stream_spec())
    attempt.allow((Phase.RESTORING,))
    with pytest.raises(PhaseRefused, match=re.escape("from FORMING this event may lead to RESTORING, not to RUNNING")):
        attempt.enter(Phase.RUNNING, 5.0)
    assert (attempt.phase, attempt.phase_since_s) == (Phase.FORMING, 0.0)
    attempt.enter(Phase.RESTORING, 5.0)
    assert (attempt.phase, attempt.phase_since_s) == (Phase.RESTORING, 5.0)


def test_before_the_first_event_no_phase_may_be_entered() -> None:
    with pytest.raises(PhaseRefused, match="may lead to none"):
        Attempt(stream_spec()).enter(Phase.RUNNING, 0.0)


@pytest.mark.parametrize("phase", Phase)
def test_whatever_the_server_tells_has_a_row_in_every_phase(phase: Phase) -> None:
    assert all((phase, event) in TRANSITIONS for event in INTERNAL)
    assert all(event.__name__ in effects.__all__ for event in INTERNAL)


def test_a_row_may_always_leave_the_phase_as_it_is_and_a_failed_stream_stays_failed() -> None:
    for (phase, _), row in TRANSITIONS.items():
        assert phase in row.to
        assert phase is not Phase.FAILED or row.to == (Phase.FAILED,)
