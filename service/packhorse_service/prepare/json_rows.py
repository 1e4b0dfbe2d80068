"""Rows of JSON data sets, in the forms people publish them, become text or conversations.

A form is told by a row's fields. A row that fits none, or several, is refused with what it has and what
is known: ``--field`` and ``--format`` decide.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packhorse_service.sources.formats import SampleFormat
from packhorse_service.sources.messages import Conversation, Role, parse_conversation, parse_messages, parse_tools
from packhorse_service.sources.sample import BadSample

__all__ = ["FORMS", "Item", "RowForm", "items_of"]

Item = str | Conversation
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowForm:
    """A way to write rows: how it is told, and what it becomes (a row may hold several samples)."""

    fields: str  # as shown to people
    format: SampleFormat
    fits: Callable[[Row], bool]
    items: Callable[[Row], list[Item]]


def items_of(row: object, field: str | None, sample_format: SampleFormat) -> list[Item]:
    """Return the samples of one row, which are text or conversations. Raises ``BadSample``.

    ``field`` names the field to read, whatever the others are; ``sample_format`` other than ``auto`` leaves only
    the forms of that format.
    """
    if isinstance(row, str) and field is None:
        return [row]
    if not isinstance(row, dict):
        raise BadSample(f"a row must be an object with named fields, or text; this one is a {type(row).__name__}")
    if field is not None:
        return [_field_item(row, field)]
    forms = [form for form in FORMS if sample_format in (SampleFormat.AUTO, form.format) and form.fits(row)]
    if len(forms) > 1:
        fitting = " and ".join(f"({form.fields})" for form in forms)
        raise BadSample(f"the row fits several forms, {fitting}; choose with --format, or name one field with --field")
    if forms:
        return forms[0].items(row)
    return [_only_messages_field(row)]


def _field_item(row: Row, field: str) -> Item:
    if field not in row:
        raise BadSample(f"the row has no field {field!r}; its fields are {', '.join(row)}")
    value = row[field]
    if isinstance(value, str):
        return value
    if _is_list_of(value, str):
        return Conversation([{"role": Role.USER.value, "content": turn} for turn in value])
    if _is_list_of(value, dict):
        return _conversation(value, row)
    raise BadSample(
        f"field {field!r} holds a {type(value).__name__}; it must hold text, a list of messages or of user turns"
    )


def _only_messages_field(row: Row) -> Item:
    """Find messages under a name of the data set's own, as agent traces have them."""
    fields = [name for name, value in row.items() if _is_list_of(value, dict) and all("role" in part for part in value)]
    if len(fields) == 1:
        return _conversation(row[fields[0]], row)
    known = "; ".join(f"({form.fields})" for form in FORMS)
    raise BadSample(
        f"the row's form is not known: its fields are {', '.join(row)}; the forms known are {known}; or any one "
        "field with a list of messages that have a role. Name the field to read with --field"
    )


def _conversation(turns: list[Row], row: Row) -> Conversation:
    """Return messages in the OpenAI form, from that form or from ShareGPT's."""
    if "from" in turns[0]:
        system = row.get("system")
        opening = [{"role": Role.SYSTEM.value, "content": system}] if isinstance(system, str) and system else []
        turns = [*opening, *(_share_gpt_message(turn) for turn in turns)]
    return Conversation(parse_messages(turns), parse_tools(row.get("tools")))


def _share_gpt_message(turn: Row) -> Row:
    speaker, value = turn.get("from"), turn.get("value")
    if speaker not in SHARE_GPT:
        raise BadSample(f"a turn is from {speaker!r}; speakers known are {', '.join(SHARE_GPT)}")
    if not isinstance(value, str):
        raise BadSample(f"a turn from {speaker!r} has the value {value!r}; it must be text")
    return SHARE_GPT[speaker](value)


def _says(role: Role) -> Callable[[str], Row]:
    return lambda text: {"role": role.value, "content": text}


def _calls(text: str) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"a function_call turn is not JSON: {error}") from error
    functions = value if isinstance(value, list) else [value]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": Role.ASSISTANT.value, "content": None, "tool_calls": calls}


SHARE_GPT: dict[str, Callable[[str], Row]] = {
    "system": _says(Role.SYSTEM),
    "human": _says(Role.USER),
    "user": _says(Role.USER),
    "gpt": _says(Role.ASSISTANT),
    "assistant": _says(Role.ASSISTANT),
    "function_call": _calls,
    "observation": _says(Role.TOOL),
    "tool": _says(Role.TOOL),
}


def _tree_paths(node: Row, before: list[Row]) -> Iterator[list[Row]]:
    """Yield every path of a message tree from its root to a leaf."""
    role = TREE_ROLES.get(node.get("role", ""))
    if role is None:
        raise BadSample(f"a message of the tree has role {node.get('role')!r}; roles are {', '.join(TREE_ROLES)}")
    path = [*before, {"role": role.value, "content": node.get("text")}]
    replies = node.get("replies") or []
    if not replies:
        yield path
    for reply in replies:
        yield from _tree_paths(reply, path)


TREE_ROLES = {"prompter": Role.USER, "assistant": Role.ASSISTANT}


def _tree_items(row: Row) -> list[Item]:
    return [Conversation(parse_messages(path)) for path in _tree_paths(row["prompt"], [])]


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, kind) for part in value)


def _pair(question: str, answer: str, *, extra: str | None = None) -> RowForm:
    """Take a question and its answer, both text; ``extra`` may name a field that goes on with the question."""

    def items(row: Row) -> list[Item]:
        asked = row[question]
        if extra is not None and row.get(extra):
            asked = f"{asked}\n\n{row[extra]}"
        messages = [{"role": Role.USER.value, "content": asked}, {"role": Role.ASSISTANT.value, "content": row[answer]}]
        return [Conversation(messages)]

    shown = f"{question}, {answer}" if extra is None else f"{question}, [{extra},] {answer}"
    return RowForm(
        shown,
        SampleFormat.MESSAGES,
        lambda row: isinstance(row.get(question), str) and isinstance(row.get(answer), str),
        items,
    )


FORMS: tuple[RowForm, ...] = (
    RowForm("text", SampleFormat.TEXT, lambda row: isinstance(row.get("text"), str), lambda row: [row["text"]]),
    RowForm(
        "messages, [tools]",
        SampleFormat.MESSAGES,
        lambda row: "messages" in row,
        lambda row: [parse_conversation(dict(row))],
    ),
    RowForm(
        "conversations, [system,] [tools]",
        SampleFormat.MESSAGES,
        lambda row: _is_list_of(row.get("conversations"), dict),
        lambda row: [_conversation(row["conversations"], row)],
    ),
    RowForm(
        "prompt with role, text, replies: a tree",
        SampleFormat.MESSAGES,
        lambda row: isinstance(row.get("prompt"), dict) and "replies" in row["prompt"],
        _tree_items,
    ),
    _pair("prompt", "completion"),
    _pair("prompt", "response"),
    _pair("question", "answer"),
    _pair("instruction", "output", extra="input"),
)
