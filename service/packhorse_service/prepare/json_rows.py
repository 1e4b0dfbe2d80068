"""Rows of JSON data sets, in the forms people publish them, become text or conversations.

A form is told by a row's fields. A row that fits none, or several, is refused with what it has and what
is known: ``--field`` and ``--format`` decide.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from packhorse_service.sources.fields import ANSWERS, NOTES, TRAINED_IF, known_fields, one_of
from packhorse_service.sources.formats import SampleFormat
from packhorse_service.sources.messages import (
    COMPANIONS,
    REASONING,
    Conversation,
    Role,
    build_conversation,
    parse_conversation,
)
from packhorse_service.sources.sample import BadSample
from packhorse_service.text.strict_json import read_json

__all__ = ["FORMS", "Item", "RowForm", "items_of"]

Item = str | Conversation
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowForm:
    """A way to write rows: how it is told, which fields it reads, and what it becomes (it may hold several samples)."""

    fields: str  # as shown to people
    format: SampleFormat
    fits: Callable[[Row], bool]
    items: Callable[[Row, Collection[str]], list[Item]]
    reads: tuple[str, ...] | None = None  # None: what it becomes refuses other fields itself


def items_of(
    row: object, field: str | None, sample_format: SampleFormat, ignored: Collection[str] = frozenset()
) -> list[Item]:
    """Return the samples of one row, which are text or conversations. Raises ``BadSample``.

    ``field`` names the field to read, whatever the others are; ``sample_format`` other than ``auto`` leaves only
    the forms of that format. A field that is not read is refused, unless it is named in ``ignored``.
    """
    if isinstance(row, str) and field is None:
        return [row]
    if not isinstance(row, dict):
        raise BadSample(f"a row must be an object with named fields, or text; this one is a {type(row).__name__}")
    if field is not None:
        return [_field_item(row, field, ignored)]
    row = {name: value for name, value in row.items() if name not in ignored}
    forms = [form for form in FORMS if sample_format in (SampleFormat.AUTO, form.format) and form.fits(row)]
    if len(forms) > 1:
        fitting = " and ".join(f"({form.fields})" for form in forms)
        raise BadSample(f"the row fits several forms, {fitting}; choose with --format, or name one field with --field")
    if not forms:
        return [_only_messages_field(row, ignored)]
    [form] = forms
    if form.reads is not None:
        # Who chose the format chose among the forms that the row has, and passes over those of the other.
        others = [
            other.reads or ("messages",) for other in FORMS if other.format is not form.format and other.fits(row)
        ]
        known_fields(row, (*form.reads, *chain.from_iterable(others), *NOTES), (), "the row")
    return form.items(row, ignored)


def _field_item(row: Row, field: str, ignored: Collection[str]) -> Item:
    if field not in row:
        raise BadSample(f"the row has no field {field!r}; its fields are {', '.join(row)}")
    value = row[field]
    if isinstance(value, str):
        return value
    if _is_list_of(value, str):
        turns = [{"role": Role.USER.value, "content": turn} for turn in value]
        return build_conversation(turns, dict(row), ignored)
    if _is_list_of(value, dict):
        return _conversation(value, row, ignored)
    raise BadSample(
        f"field {field!r} holds a {type(value).__name__}; it must hold text, a list of messages or of user turns"
    )


def _only_messages_field(row: Row, ignored: Collection[str]) -> Item:
    """Find messages under a name of the data set's own, as agent traces have them."""
    fields = [
        name
        for name, value in row.items()
        if name not in COMPANIONS and _is_list_of(value, dict) and all("role" in part for part in value)
    ]
    if len(fields) == 1:
        known_fields(row, (fields[0], *COMPANIONS, *ANSWERS, *NOTES), (), "the row")
        return _conversation(row[fields[0]], row, ignored, one_of(row, ANSWERS, "the row"))
    known = "; ".join(f"({form.fields})" for form in FORMS)
    raise BadSample(
        f"the row's form is not known: its fields are {', '.join(row)}; the forms known are {known}; or any one "
        "field with a list of messages that have a role. Name the field to read with --field"
    )


def _conversation(turns: list[Row], row: Row, ignored: Collection[str], answer: object = None) -> Conversation:
    """Return messages in the OpenAI form, from that form or from ShareGPT's."""
    if any("from" in turn for turn in turns):
        turns = [_share_gpt_message(turn, f"turn {number}", ignored) for number, turn in enumerate(turns, start=1)]
    return build_conversation(turns, dict(row), ignored, answer)


def _share_gpt_message(turn: Row, where: str, ignored: Collection[str]) -> Row:
    speaker, value = turn.get("from"), turn.get("value")
    if speaker not in SHARE_GPT:
        raise BadSample(f"a turn is from {speaker!r}; speakers known are {', '.join(SHARE_GPT)}")
    if not isinstance(value, str):
        raise BadSample(f"a turn from {speaker!r} has the value {value!r}; it must be text")
    fields = known_fields(turn, TURN_FIELDS, ignored, f"{where} ({speaker})")
    return SHARE_GPT[speaker](value) | {name: fields[name] for name in fields if name not in ("from", "value")}


TURN_FIELDS = ("from", "value", "name", "tool_call_id", *REASONING, *TRAINED_IF, "id")


def _says(role: Role) -> Callable[[str], dict[str, Any]]:
    return lambda text: {"role": role.value, "content": text}


def _calls(text: str) -> dict[str, Any]:
    try:
        value = read_json(text)
    except ValueError as error:
        raise BadSample(f"a function_call turn is not JSON: {error}") from error
    functions = value if isinstance(value, list) else [value]
    return {"role": Role.ASSISTANT.value, "content": None, "tool_calls": functions}


SHARE_GPT: dict[str, Callable[[str], dict[str, Any]]] = {
    "system": _says(Role.SYSTEM),
    "human": _says(Role.USER),
    "user": _says(Role.USER),
    "gpt": _says(Role.ASSISTANT),
    "chatgpt": _says(Role.ASSISTANT),
    "assistant": _says(Role.ASSISTANT),
    "function_call": _calls,
    "observation": _says(Role.TOOL),
    "tool": _says(Role.TOOL),
}


def _tree_paths(node: Row, before: list[Row], ignored: Collection[str]) -> Iterator[list[Row]]:
    """Yield every path of a message tree from its root to a leaf."""
    role = TREE_ROLES.get(node.get("role", ""))
    if role is None:
        raise BadSample(f"a message of the tree has role {node.get('role')!r}; roles are {', '.join(TREE_ROLES)}")
    if node.get("deleted") and "deleted" not in ignored:
        raise BadSample("a message of the tree is deleted; remove it, or name the field with --ignore-field")
    known_fields(node, NODE_FIELDS, ignored, "a message of the tree")
    path = [*before, {"role": role.value, "content": node.get("text")}]
    replies = node.get("replies") or []
    if not replies:
        yield path
    for reply in replies:
        yield from _tree_paths(reply, path, ignored)


TREE_ROLES = {"prompter": Role.USER, "assistant": Role.ASSISTANT}

# Beside role, text and replies: what reviewers noted.
NODE_FIELDS = (
    *("role", "text", "replies", "deleted", *sorted(NOTES), "parent_id", "user_id", "created_date", "synthetic"),
    *("model_name", "review_count", "review_result", "emojis", "labels", "rank", "detoxify"),
)


def _tree_items(row: Row, ignored: Collection[str]) -> list[Item]:
    return [build_conversation(path, {}) for path in _tree_paths(row["prompt"], [], ignored)]


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, kind) for part in value)


def _is_said(value: object) -> bool:
    return isinstance(value, str | dict) or _is_list_of(value, dict)


def _pair(question: str, answer: str, *, extra: str | None = None) -> RowForm:
    """Take a question and its answer, each text or messages; ``extra`` may name what goes on with the question."""

    def items(row: Row, ignored: Collection[str]) -> list[Item]:
        asked = row[question]
        if extra is not None and row.get(extra):
            if not isinstance(asked, str) or not isinstance(row[extra], str):
                raise BadSample(f"{question!r} and {extra!r} must both be text")
            asked = f"{asked}\n\n{row[extra]}"
        if isinstance(asked, str):
            asked = [{"role": Role.USER.value, "content": asked}]
        return [_conversation(asked, row, ignored, row[answer])]

    shown = f"{question}, {answer}" if extra is None else f"{question}, [{extra},] {answer}"
    reads = (question, answer, *([] if extra is None else [extra]), *COMPANIONS)
    return RowForm(
        shown,
        SampleFormat.MESSAGES,
        lambda row: (
            (isinstance(row.get(question), str) or _is_list_of(row.get(question), dict)) and _is_said(row.get(answer))
        ),
        items,
        reads,
    )


FORMS: tuple[RowForm, ...] = (
    RowForm(
        "text", SampleFormat.TEXT, lambda row: isinstance(row.get("text"), str), lambda row, _: [row["text"]], ("text",)
    ),
    RowForm(
        "messages, [system,] [tools]",
        SampleFormat.MESSAGES,
        lambda row: "messages" in row,
        lambda row, ignored: [parse_conversation(dict(row), ignored)],
    ),
    RowForm(
        "conversations, [system,] [tools]",
        SampleFormat.MESSAGES,
        lambda row: _is_list_of(row.get("conversations"), dict),
        lambda row, ignored: [_conversation(row["conversations"], row, ignored, one_of(row, ANSWERS, "the row"))],
        ("conversations", *COMPANIONS, *ANSWERS),
    ),
    RowForm(
        "prompt with role, text, replies: a tree",
        SampleFormat.MESSAGES,
        lambda row: isinstance(row.get("prompt"), dict) and "replies" in row["prompt"],
        _tree_items,
        ("prompt", "message_tree_id", "tree_state"),
    ),
    *(_pair("prompt", answer) for answer in ("completion", "response", "answer")),
    *(_pair("question", answer) for answer in ("answer", "response")),
    _pair("query", "response"),
    _pair("instruction", "output", extra="input"),
    _pair("instruction", "response", extra="context"),
)
