"""HELLO: its versions are compared before anything else of it is read, and facts that are not known are kept."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.errors import ProtocolError
from packhorse.rules import Severity, Violation
from packhorse.schema import INTEGER_LIMIT
from packhorse.wire.facts import TEXT_LIMIT, UNKNOWN_FACTS_LIMIT, FactValue, UnknownFact
from packhorse.wire.hello import PROTOCOL_VERSION, ForeignHello, Hello, OtherVersion
from packhorse.wire.limits import NAME_LIMIT
from packhorse.wire.messages import Reject, decode, encode
from tests.client.messages import EXAMPLES
from tests.client.wire.other_versions import NEXT_VERSION, VERSION_1, hello_of

HELLO: Hello = EXAMPLES["HELLO"]  # type: ignore[assignment]


def foreign(header: bytes) -> ForeignHello:
    """What is read of a HELLO of another version."""
    with pytest.raises(OtherVersion) as error:
        decode([header])
    return error.value.hello


# Versions -------------------------------------------------------------------------------------------


def test_of_an_older_hello_the_beginning_is_read() -> None:
    assert foreign(VERSION_1) == ForeignHello(min_version=1, max_version=1, stream="train", reader=HELLO.reader)


@pytest.mark.parametrize(
    "changes",
    [{}, {"surprise": 1}, {"layout": None}, {"contract": "in another form"}, {"window": [1]}],
    ids=["the same form", "a field more", "a field less", "a field of another type", "a value of another type"],
)
def test_of_a_newer_hello_the_beginning_is_read_whatever_follows(changes: dict[str, Any]) -> None:
    found = foreign(hello_of(NEXT_VERSION, NEXT_VERSION + 1, **changes))
    assert (found.min_version, found.max_version, found.problem) == (NEXT_VERSION, NEXT_VERSION + 1, "")
    assert (found.stream, found.reader) == (HELLO.stream, HELLO.reader)


def test_a_hello_of_several_versions_is_read_where_its_form_is_known() -> None:
    message, _ = decode([hello_of(PROTOCOL_VERSION - 1, NEXT_VERSION)])
    assert isinstance(message, Hello)
    assert (message.min_version, message.max_version) == (PROTOCOL_VERSION - 1, NEXT_VERSION)


@pytest.mark.parametrize(
    "versions", [(PROTOCOL_VERSION, NEXT_VERSION), (PROTOCOL_VERSION - 1, PROTOCOL_VERSION)], ids=["newer", "older"]
)
def test_a_hello_of_several_versions_in_another_form_is_of_another_version(versions: tuple[int, int]) -> None:
    """Not an illegal message: the versions meet, the forms do not."""
    found = foreign(hello_of(*versions, surprise=1))
    assert (found.min_version, found.max_version) == versions
    assert "surprise" in found.problem


def test_a_hello_of_this_version_alone_is_read_exactly_or_illegal() -> None:
    with pytest.raises(ProtocolError, match="surprise") as error:
        decode([hello_of(PROTOCOL_VERSION, PROTOCOL_VERSION, surprise=1)])
    assert not isinstance(error.value, OtherVersion)


@pytest.mark.parametrize(
    "changes",
    [
        {"min_version": None},
        {"max_version": "3"},
        {"max_version": True},
        {"stream": None},
        {"stream": "x" * 65},
        {"reader": [0, 0, 0]},
        {"reader": None},
    ],
    ids=str,
)
def test_what_no_version_says_is_illegal(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as error:
        decode([hello_of(NEXT_VERSION, NEXT_VERSION, **changes)])
    assert not isinstance(error.value, OtherVersion)


@given(st.integers(-3, 9), st.integers(-3, 9))
def test_a_hello_is_read_where_its_versions_include_this_one_and_no_other(lowest: int, highest: int) -> None:
    header = hello_of(lowest, highest)
    if lowest <= PROTOCOL_VERSION <= highest:
        assert isinstance(decode([header])[0], Hello)
    else:
        assert foreign(header).problem == ""


def test_the_message_that_rejects_is_the_same_in_every_version() -> None:
    """So that the other side can read why. Never change these bytes, whatever version the protocol has."""
    fields = {"rule": "PROTOCOL", "severity": "error", "field": "a", "want": "b", "got": "c", "remedy": "d"}
    header = msgpack.packb(["REJECT", {"stream": "train", "violations": [fields]}])
    violation = Violation(rule="PROTOCOL", severity=Severity.ERROR, field="a", want="b", got="c", remedy="d")
    assert encode(Reject(stream="train", violations=(violation,))) == header
    assert list(Severity) == ["error", "warn"]


# Facts ----------------------------------------------------------------------------------------------


def declaring(facts: object) -> Hello:
    """HELLO of a trainer with these facts, from the wire."""
    tag, fields = msgpack.unpackb(encode(HELLO))
    fields["contract"]["trainer"] = facts
    message, _ = decode([msgpack.packb([tag, fields])])
    assert isinstance(message, Hello)
    return message


def refused(facts: object) -> str:
    with pytest.raises(ProtocolError) as error:
        declaring(facts)
    return str(error.value)


def test_what_a_trainer_leaves_out_is_not_declared() -> None:
    assert declaring({}).contract.trainer == TrainerFacts()
    assert declaring(None).contract.trainer is None
    assert declaring({"world_size": None, "newer": None}) == declaring({}), "nil is left out too"
    assert msgpack.unpackb(encode(declaring({"sft": True})))[1]["contract"]["trainer"] == {"sft": True}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (True, True),
        ("text", "text"),
        (-5, -5),
        (0.5, 0.5),
        ([1, "two", False], (1, "two", False)),
        ([], ()),
        ("x" * TEXT_LIMIT, "x" * TEXT_LIMIT),
    ],
)
def test_a_fact_that_is_not_known_is_kept_beside_the_others(value: object, kept: FactValue) -> None:
    hello = declaring({"newer": value, "stack": "own", "a_newer": 1})
    assert hello.contract.trainer == TrainerFacts(stack=Stack.OWN)
    assert hello.unknown_facts == (UnknownFact("a_newer", 1), UnknownFact("newer", kept))
    assert decode([encode(hello)])[0] == hello


def test_a_value_that_is_not_known_is_a_fact_that_is_not_known() -> None:
    hello = declaring({"stack": "jax", "world_size": 4})
    assert hello.contract.trainer == TrainerFacts(world_size=4)
    assert hello.unknown_facts == (UnknownFact("stack", "jax"),)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"world_size": "4"}, "world_size"),
        ({"stack": 1}, "stack"),
        ({"sft": 0}, "sft"),
        ({"hierarchical_cp_sizes": [2.0]}, "hierarchical_cp_sizes"),
        ({"newer": {"deep": 1}}, "newer"),
        ({"newer": [[1]]}, "newer"),
        ({"newer": [None]}, "newer"),
        ({"newer": b"bytes"}, "newer"),
        ({"newer": float("nan")}, "newer"),
        ({"newer": INTEGER_LIMIT}, "newer"),
        ({"newer": "x" * (TEXT_LIMIT + 1)}, "newer"),
        ({"newer": [0] * (TEXT_LIMIT + 1)}, "newer"),
        ({"x" * (NAME_LIMIT + 1): 1}, "name"),
        ({"a\nb": 1}, "name"),
        ({"": 1}, "name"),
        ({"größe": 1}, "name"),
        ({b"bytes": 1}, "name"),
        ({f"f{number}": 1 for number in range(UNKNOWN_FACTS_LIMIT + 1)}, str(UNKNOWN_FACTS_LIMIT + 1)),
        ([], "list"),
        ("facts", "str"),
    ],
    ids=str,
)
def test_facts_that_are_none_or_too_many_or_too_large_are_refused(facts: object, named: str) -> None:
    told = refused(facts)
    assert told.startswith("HELLO.contract.trainer")
    assert named in told


def test_as_many_facts_as_may_be_are_kept() -> None:
    assert (
        len(declaring({f"f{number}": 1 for number in range(UNKNOWN_FACTS_LIMIT)}).unknown_facts) == UNKNOWN_FACTS_LIMIT
    )


FACTS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True) | st.sampled_from(["stack", "world_size", "sft"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=5,
)


@given(FACTS)
def test_any_facts_are_refused_or_come_back_as_they_were(facts: dict[str, object]) -> None:
    try:
        hello = declaring(facts)
    except ProtocolError:
        return
    assert decode([encode(hello)])[0] == hello
