"""Another client could be written from the page: its messages and states are those of the code."""

from __future__ import annotations

from enum import StrEnum
from types import NoneType
from typing import Any, get_type_hints

import pytest

from packhorse.protocol.client_session import TRANSITIONS as CLIENT
from packhorse.protocol.client_session import State
from packhorse.rows.payload import ArrayEntry
from packhorse.rules import Violation
from packhorse.schema import HEADER_LIMIT_BYTES
from packhorse.wire.facts import TEXT_LIMIT, UNKNOWN_FACTS_LIMIT
from packhorse.wire.limits import SNAPSHOT_LIMIT_BYTES
from packhorse.wire.messages import TAGS, ErrorCode, Hello, WaitReason
from packhorse_service.protocol.admission import CONNECTIONS_A_READER, CONNECTIONS_BESIDE, Limits
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.stream_session import TRANSITIONS as SERVER
from packhorse_service.server.router import INBOUND_LIMIT_BYTES
from tests.docs.pages import grid, rows, text_of
from tools.docs.protocol_page import comments_of
from tools.docs.state_tables import event_name

PAGE = text_of("protocol.md")
STATES = [(State, CLIENT, "## The client's states"), (Phase, SERVER, "## The server's states, for one stream")]


@pytest.mark.parametrize("name", [*TAGS, "body"])
def test_a_message_has_its_table_in_a_section_of_its_own(name: str) -> None:
    """The table is written from its class."""
    section = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    assert f"<!-- begin {name}: " in section


def test_a_field_is_described_by_the_comment_behind_it() -> None:
    comments = comments_of(Hello)
    assert comments["start"] == "where this process began"
    assert comments["reader"] == ""


@pytest.mark.parametrize("kind", [Violation, ArrayEntry, WaitReason, ErrorCode])
def test_names_in_messages_are_on_the_page(kind: Any) -> None:
    names = list(kind) if issubclass(kind, StrEnum) else list(get_type_hints(kind))
    assert not [name for name in names if f"`{name}`" not in PAGE and name != NoneType]


@pytest.mark.parametrize(("states", "transitions", "heading"), STATES)
def test_an_event_has_a_place_where_the_page_says(states: Any, transitions: Any, heading: str) -> None:
    table = grid(PAGE, heading)
    placed = {cell for cell, text in table.items() if text}
    assert placed == {(event_name(event), state.name) for state, event in transitions}
    left_out = {state.name for state in states} - {state for _, state in table}
    assert left_out <= {"IDLE"}, "a state in which nothing is said"


def test_limits_are_those_of_the_code() -> None:
    limits = {what: limit for what, limit, _ in rows(PAGE, "## Limits")}
    of_server = Limits.for_readers(1)
    assert limits["a header"] == f"{HEADER_LIMIT_BYTES >> 10} KiB"
    assert limits["a snapshot"] == f"{SNAPSHOT_LIMIT_BYTES >> 10} KiB"
    assert limits["a frame to the server"] == f"{INBOUND_LIMIT_BYTES >> 10} KiB"
    assert limits["bytes that become no message"].startswith(f"{of_server.unparsed_bytes >> 10} KiB")
    assert limits["connections"] == f"{CONNECTIONS_A_READER} for each reader and {CONNECTIONS_BESIDE}"
    assert limits["silence before a valid HELLO"] == f"{of_server.handshake_timeout_s:g} s"
    assert limits["HELLO"] == f"{of_server.hellos.burst} at once, one every {1 / of_server.hellos.per_s:g} s"
    messages = of_server.messages
    told = (
        f"{messages.burst} at once, {messages.per_s:g} a second, {of_server.messages_per_sent:g} for each that was sent"
    )
    assert limits["messages"].startswith(told)
    facts = f"{UNKNOWN_FACTS_LIMIT}, with texts and arrays of up to {TEXT_LIMIT}"
    assert limits["facts that the server does not know"] == facts
    errors = of_server.protocol_errors
    assert limits["messages that are answered with an error"] == f"{errors.burst} at once, {errors.per_s:g} a second"
