"""Conversations in the OpenAI form, checked: what a chat template is given.

A message has a role, content (text, typed text parts, or null where it calls tools) and, from an assistant,
``tool_calls`` and ``reasoning_content``. What else people write for these is brought into that form; a field
that is not read is refused by name (``fields``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packhorse_service.sources.fields import (
    ANSWERS,
    NOTES,
    SYSTEMS,
    TOOLS,
    TRAINED_IF,
    is_trained,
    known_fields,
    one_of,
)
from packhorse_service.sources.sample import BadSample
from packhorse_service.text.strict_json import read_json

__all__ = ["COMPANIONS", "REASONING", "Conversation", "Message", "Role", "build_conversation", "parse_conversation"]

Message = dict[str, Any]

NOTHING: frozenset[str] = frozenset()

REASONING = ("reasoning_content", "reasoning", "thinking")
MESSAGE_FIELDS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "function_call",
    "tool_call_id",
    *REASONING,
    *TRAINED_IF,
    "id",
)
CALL_FIELDS = ("id", "type", "index", "function", "name", "arguments")
FUNCTION_FIELDS = ("name", "arguments")
PART_FIELDS = ("type", "text", "value")

# What may stand beside a list of messages.
COMPANIONS = (*SYSTEMS, "history", *TOOLS)


class Role(StrEnum):
    """Role of the one who speaks in a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


# What OpenAI called the role of a tool's answer before there were tools.
FORMER_ROLES = {"function": Role.TOOL.value}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, the tools offered in them (``None`` = none), and which of an assistant are not trained on."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    untrained: frozenset[int] = frozenset()

    def as_json(self) -> dict[str, Any]:
        """Return the conversation as ``parse_conversation`` reads it."""
        messages = [
            message | {"weight": 0} if number in self.untrained else message
            for number, message in enumerate(self.messages)
        ]
        return {"messages": messages} | ({"tools": self.tools} if self.tools else {})


def parse_conversation(value: object, ignored: Collection[str] = NOTHING) -> Conversation:
    """Check ``value``: a list of messages, or an object with ``messages`` and what may stand beside them.

    Fields named in ``ignored`` are left out. Raises ``BadSample``.
    """
    if not isinstance(value, dict):
        return build_conversation(value, {}, ignored)
    if "messages" not in value:
        raise BadSample(
            f"its fields are {_listed(value)}; a conversation is a list of messages or has a field 'messages'"
        )
    fields = known_fields(value, ("messages", *COMPANIONS, *ANSWERS, "prompt", *NOTES), ignored, "the conversation")
    turns = value["messages"]
    prompt = fields.get("prompt")
    if prompt is not None and not _opens_with(turns, prompt):
        raise BadSample("the conversation has 'prompt' beside 'messages', whose first user turn says something else")
    return build_conversation(turns, fields, ignored, one_of(fields, ANSWERS, "the conversation"))


def build_conversation(
    turns: object, beside: Message, ignored: Collection[str] = NOTHING, answer: object = None
) -> Conversation:
    """Build a conversation of a list of messages, what stands ``beside`` it (``COMPANIONS``), and its ``answer``.

    The answer is text, a message or a list of them. Raises ``BadSample``.
    """
    if not isinstance(turns, list) or not turns:
        raise BadSample(f"messages must be a list of at least one message, and it is {_shown(turns)}")
    turns = [*_history(beside.get("history")), *turns]
    if answer is not None:
        turns = [*turns, *_answer(answer, turns)]
    system = one_of(beside, SYSTEMS, "the row")
    if system is not None:
        turns = _with_system(system, turns)
    parsed = [_message(turn, f"message {number}", ignored) for number, turn in enumerate(turns, start=1)]
    untrained = (
        number for number, (message, trained) in enumerate(parsed) if message["role"] == Role.ASSISTANT and not trained
    )
    return Conversation(
        [message for message, _ in parsed], _tools(one_of(beside, TOOLS, "the row")), frozenset(untrained)
    )


def _opens_with(turns: object, prompt: object) -> bool:
    if prompt == turns:
        return True
    said = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return prompt in said[:2]


def _history(value: object) -> list[object]:
    """Return earlier turns, given as messages or as pairs of question and answer."""
    if value is None or value == []:
        return []
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return value
    if not isinstance(value, list) or not all(_is_pair(pair) for pair in value):
        raise BadSample(f"history is {_shown(value)}; it must be a list of messages, or of pairs of two texts")
    roles = (Role.USER.value, Role.ASSISTANT.value)
    return [{"role": role, "content": text} for pair in value for role, text in zip(roles, pair, strict=True)]


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _answer(value: object, turns: list[Any]) -> list[object]:
    """Return the turns of an answer that stands beside the messages it answers."""
    last = turns[-1]
    if isinstance(last, dict) and last.get("role") == Role.ASSISTANT:
        raise BadSample("the messages end with an assistant's and an answer stands beside them; keep one of the two")
    if isinstance(value, str):
        return [{"role": Role.ASSISTANT.value, "content": value}]
    turns = value if isinstance(value, list) else [value]
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise BadSample(f"the answer is {_shown(value)}; it must be text, a message or a list of messages")
    return turns


def _with_system(system: object, turns: list[Any]) -> list[Any]:
    if not isinstance(system, str):
        raise BadSample(f"system is {_shown(system)}; it must be text")
    first = turns[0]
    opening = first if isinstance(first, dict) and first.get("role") in (Role.SYSTEM, Role.DEVELOPER) else None
    if opening is None:
        return [{"role": Role.SYSTEM.value, "content": system}, *turns]
    if opening.get("content") != system:
        raise BadSample("it has a system prompt and begins with another system message; keep one of the two")
    return turns


def _tools(value: object) -> list[Message] | None:
    """Check a list of tools, each wrapped as ``{"type": "function", "function": …}``. Raises ``BadSample``.

    Data sets in table form keep the list as JSON text, which is parsed.
    """
    if isinstance(value, str) and value.strip():
        value = _json(value, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadSample(f"tools must be a list of objects, and it is {_shown(value)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _message(value: object, where: str, ignored: Collection[str]) -> tuple[Message, bool]:
    """Return a message as a template is given it, and whether it is trained on."""
    if not isinstance(value, dict):
        raise BadSample(f"{where} must be an object with 'role' and 'content', and it is {_shown(value)}")
    role = value.get("role")
    role = FORMER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in list(Role):
        raise BadSample(f"{where} has role {_shown(role)}; roles are {', '.join(Role)}")
    where = f"{where} ({role})"
    fields = known_fields(value, MESSAGE_FIELDS, ignored, where)
    trained = is_trained(fields, role == Role.ASSISTANT, where)
    calls = _calls(fields, where)
    message: Message = {"role": role, "content": _content(value.get("content"), where, optional=bool(calls))}
    reasoning = one_of(fields, REASONING, where)
    if (calls or reasoning is not None) and role != Role.ASSISTANT:
        raise BadSample(f"{where} has {'tool_calls' if calls else 'reasoning'}; only an assistant's message may")
    if reasoning is not None:
        message["reasoning_content"] = _content(reasoning, f"{where}, its reasoning,", optional=False)
    if calls:
        message["tool_calls"] = calls
    named = {name: fields[name] for name in ("name", "tool_call_id") if name in fields}
    for name, text in named.items():
        if not isinstance(text, str):
            raise BadSample(f"{where} has {name}={_shown(text)}; it must be text")
    return message | named, trained


def _content(value: object, where: str, *, optional: bool) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, where) for part in value)
    if value is None and optional:
        return None
    rule = "text or a list of text parts" + ("" if optional else " (null only beside tool_calls)")
    raise BadSample(f"{where} has content {_shown(value)}; it must be {rule}")


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        kind = value.get("type") if isinstance(value, dict) else value
        raise BadSample(f"{where} has a content part of type {_shown(kind)}; only parts of type 'text' are read")
    known_fields(value, PART_FIELDS, NOTHING, f"{where}, a text part,")
    text = value.get("text", value.get("value"))
    if not isinstance(text, str):
        raise BadSample(f"{where} has a text part with the fields {_listed(value)}; the text belongs in 'text'")
    return text


def _calls(fields: Message, where: str) -> list[Message]:
    calls, former = fields.get("tool_calls"), fields.get("function_call")
    if calls and former:
        raise BadSample(f"{where} has 'tool_calls' and 'function_call', which mean the same; keep one")
    calls = [former] if former else calls or []
    if not isinstance(calls, list):
        raise BadSample(f"{where} has tool_calls {_shown(calls)}; it must be a list")
    return [_tool_call(call, where) for call in calls]


def _tool_call(value: object, where: str) -> Message:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadSample(
            f"{where} has the tool call {_shown(value)}; it must have 'function' with 'name' and 'arguments'"
        )
    known_fields(value, CALL_FIELDS, NOTHING, f"{where}, a tool call,")
    if function is not value:
        known_fields(function, FUNCTION_FIELDS, NOTHING, f"{where}, a tool call's function,")
    arguments = function.get("arguments", {})
    # OpenAI keeps arguments as JSON text; templates write `arguments | tojson`, which would quote text again.
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where} has tool call arguments that") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise BadSample(f"{where} calls {function['name']!r} with {_shown(arguments)}; arguments must be an object")
    rest = {key: value[key] for key in ("id", "type", "index") if key in value and value[key] is not None}
    return {"type": "function"} | rest | {"function": {"name": function["name"], "arguments": arguments}}


def _json(text: str, what: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        raise BadSample(f"{what}: {error}") from error


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in fields) or "none"


def _shown(value: object) -> str:
    """Show a value within a message: short, and containers by what they are."""
    if isinstance(value, dict):
        return f"an object with the fields {_listed(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
