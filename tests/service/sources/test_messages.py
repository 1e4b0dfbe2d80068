"""A conversation says all that it holds, or is refused by the name of what nobody reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.sources.fields import NOTES, TRAINED_IF
from packhorse_service.sources.messages import MESSAGE_FIELDS, Conversation, parse_conversation
from packhorse_service.sources.sample import BadSample

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
NAMES = st.text("abcdefgh_", min_size=1, max_size=12)
SAYING = st.text(min_size=1) | st.integers() | st.booleans() | st.lists(st.integers(), min_size=1)


def turn(**more: object) -> Conversation:
    return parse_conversation([ASKED, ANSWERED | more])


@given(
    name=NAMES.filter(lambda name: name not in MESSAGE_FIELDS), value=SAYING, place=st.sampled_from(["row", "message"])
)
def test_a_field_that_nobody_reads_is_refused_by_name_unless_it_is_ignored(
    name: str, value: object, place: str
) -> None:
    if place == "row" and name in NOTES:
        return
    row: dict[str, Any] = {"messages": [ASKED, ANSWERED | ({name: value} if place == "message" else {})]}
    row |= {name: value} if place == "row" else {}
    with pytest.raises(BadSample, match=f"the field '{name}', which nothing reads.*ignore_fields"):
        parse_conversation(row)
    assert parse_conversation(row, {name}) == parse_conversation([ASKED, ANSWERED])
    nothings: list[object] = [None, "", [], {}]
    for nothing in nothings:
        empty = json.loads(json.dumps(row).replace(json.dumps({name: value})[1:-1], json.dumps({name: nothing})[1:-1]))
        assert parse_conversation(empty) == parse_conversation([ASKED, ANSWERED])


@pytest.mark.parametrize(("name", "yes"), TRAINED_IF.items())
@pytest.mark.parametrize("kind", [int, float, bool])
def test_every_way_to_say_that_a_turn_is_not_trained_on_is_heard(name: str, yes: int, kind: type) -> None:
    assert turn(**{name: kind(1 - yes)}).untrained == {1}
    assert turn(**{name: kind(yes)}).untrained == turn(**{name: None}).untrained == frozenset()
    assert name not in turn(**{name: kind(1 - yes)}).messages[1]
    assert parse_conversation([ASKED | {name: kind(1 - yes)}, ANSWERED]).untrained == frozenset()
    with pytest.raises(BadSample, match=f"{name}=.*only an assistant's turns"):
        parse_conversation([ASKED | {name: kind(yes)}, ANSWERED])


@pytest.mark.parametrize("weight", [0.5, 2, -1, "0", "1", float("nan"), [1], 10**400])
@pytest.mark.parametrize("name", ["weight", "loss", "masked"])
def test_other_weights_than_0_and_1_are_refused(name: str, weight: object) -> None:
    with pytest.raises(BadSample, match=f"{name}=.*1 or 0"):
        turn(**{name: weight})


def test_two_weights_may_agree_and_not_contradict() -> None:
    assert turn(weight=0, masked=True, train=False).untrained == {1}
    with pytest.raises(BadSample, match="contradict"):
        turn(weight=0, train=True)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"system": "s"}, [{"role": "system", "content": "s"}, ASKED]),
        ({"system_prompt": "s"}, [{"role": "system", "content": "s"}, ASKED]),
        ({"history": [["q", "r"]]}, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}, ASKED]),
        ({"history": [ANSWERED]}, [ANSWERED, ASKED]),
        ({"response": "b"}, [ASKED, ANSWERED]),
        ({"completion": [ANSWERED]}, [ASKED, ANSWERED]),
        ({"answer": ANSWERED}, [ASKED, ANSWERED]),
        ({"prompt": "a"}, [ASKED]),
        ({"system": None, "history": [], "tools": "", "id": 7}, [ASKED]),
    ],
)
def test_what_stands_beside_the_messages_is_part_of_the_conversation(
    beside: dict[str, object], expected: list[dict[str, Any]]
) -> None:
    assert parse_conversation({"messages": [ASKED], **beside}).messages == expected


@pytest.mark.parametrize("name", ["tools", "functions", "tool_defs"])
def test_tools_are_read_under_each_name_as_lists_and_as_text(name: str) -> None:
    tools = [{"name": "f", "parameters": {}}]
    for value in (tools, json.dumps(tools)):
        assert parse_conversation({"messages": [ASKED], name: value}).tools == [
            {"type": "function", "function": tools[0]}
        ]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": [ANSWERED], "response": "c"}, "end with an assistant's and an answer"),
        ({"messages": [ASKED], "response": "b", "answer": "b"}, "'response' and 'answer'|'answer' and 'response'"),
        ({"messages": [{"role": "system", "content": "t"}, ASKED], "system": "s"}, "another system message"),
        ({"messages": [ASKED], "tools": [{"name": "f"}], "functions": [{"name": "g"}]}, "'tools' and 'functions'"),
        ({"messages": [ASKED], "prompt": "other"}, "says something else"),
        ({"messages": [ASKED], "history": ["q"]}, "pairs of two texts"),
        ({"messages": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]}, "fields 'chosen', 'rejected'"),
        ({"messages": [ASKED | {"name": 3}]}, "name=3; it must be text"),
        ({"messages": [ASKED | {"reasoning_content": "r"}]}, "only an assistant's"),
        ({"messages": [ANSWERED | {"tool_calls": [CALL], "function_call": CALL["function"]}]}, "mean the same"),
        ({"messages": [ANSWERED | {"tool_calls": [CALL | {"result": 3}]}]}, "'result'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]}, "'bold'"),
    ],
)
def test_what_contradicts_itself_or_is_not_read_is_refused(row: dict[str, object], error: str) -> None:
    with pytest.raises(BadSample, match=error):
        parse_conversation(row)


def test_former_calls_and_reasoning_by_other_names_mean_what_they_mean_today() -> None:
    former = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    calling, answering = parse_conversation(former).messages
    assert calling == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert answering == {"role": "tool", "content": "2", "name": "f"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert turn(**{name: "r"}).messages[1] == ANSWERED | {"reasoning_content": "r"}


@pytest.mark.parametrize("nothing", [None, []])
def test_no_calls_are_none_whatever_a_table_has_there(nothing: object) -> None:
    assert turn(tool_calls=nothing).messages[1] == ANSWERED


@given(weights=st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=4), system=st.booleans())
def test_what_is_written_is_read_again(weights: list[int | None], system: bool) -> None:
    messages = [message for weight in weights for message in (ASKED, ANSWERED | {"weight": weight})]
    parsed = parse_conversation({"messages": messages, "tools": [{"name": "f"}]} | ({"system": "s"} if system else {}))
    assert parse_conversation(parsed.as_json()) == parsed
    assert len(parsed.untrained) == weights.count(0)
