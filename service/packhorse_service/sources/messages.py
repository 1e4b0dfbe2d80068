"""Conversations in the OpenAI form, checked: what a chat template is given.

A message has a role, content (text, typed text parts, or null where it calls tools) and, from an
assistant, ``tool_calls``. Fields unknown here (``name``, ``reasoning_content`` …) reach the template as
they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packhorse_service.sources.sample import BadSample

__all__ = ["Conversation", "Message", "Role", "parse_conversation", "parse_messages", "parse_tools"]

Message = dict[str, Any]

# Per-message weights of other tools. The mask is 0 or 1 by role, so only what says the same is accepted.
WEIGHT_FIELDS = ("loss_weight", "weight")


class Role(StrEnum):
    """Role of the one who speaks in a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and the tools offered in them (``None`` = none)."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None


def parse_conversation(value: object) -> Conversation:
    """Check ``value``: a list of messages, or ``{"messages": […], "tools": […]}``. Raises ``BadSample``."""
    if isinstance(value, dict):
        if "messages" not in value:
            raise BadSample(
                f"its fields are {_listed(value)}; a conversation is a list of messages or has a field 'messages'"
            )
        return Conversation(parse_messages(value["messages"]), parse_tools(value.get("tools")))
    return Conversation(parse_messages(value))


def parse_messages(value: object) -> list[Message]:
    """Check a list of messages: content becomes text or ``None``, arguments become objects. Raises ``BadSample``."""
    if not isinstance(value, list) or not value:
        raise BadSample(f"messages must be a list of at least one message, and it is {_shown(value)}")
    return [_message(message, f"message {number}") for number, message in enumerate(value, start=1)]


def parse_tools(value: object) -> list[Message] | None:
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


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadSample(f"{where} must be an object with 'role' and 'content', and it is {_shown(value)}")
    role = value.get("role")
    if role not in list(Role):
        raise BadSample(f"{where} has role {_shown(role)}; roles are {', '.join(Role)}")
    where = f"{where} ({role})"
    _refuse_weights(value, where)
    calls = value.get("tool_calls")
    message = value | {"content": _content(value.get("content"), where, optional=bool(calls))}
    if calls:
        if role != Role.ASSISTANT:
            raise BadSample(f"{where} has tool_calls; only an assistant's message may")
        message["tool_calls"] = _tool_calls(calls, where)
    return message


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
    text = value.get("text", value.get("value"))
    if not isinstance(text, str):
        raise BadSample(f"{where} has a text part with the fields {_listed(value)}; the text belongs in 'text'")
    return text


def _tool_calls(value: object, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise BadSample(f"{where} has tool_calls {_shown(value)}; it must be a list")
    return [_tool_call(call, where) for call in value]


def _tool_call(value: object, where: str) -> Message:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadSample(
            f"{where} has the tool call {_shown(value)}; it must have 'function' with 'name' and 'arguments'"
        )
    arguments = function.get("arguments", {})
    # OpenAI keeps arguments as JSON text; templates write `arguments | tojson`, which would quote text again.
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where} has tool call arguments that") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise BadSample(f"{where} calls {function['name']!r} with {_shown(arguments)}; arguments must be an object")
    rest = {key: field for key, field in value.items() if key not in function and key != "function"}
    return {"type": "function"} | rest | {"function": function | {"arguments": arguments}}


def _refuse_weights(message: Message, where: str) -> None:
    trained = 1 if message["role"] == Role.ASSISTANT else 0
    for field in WEIGHT_FIELDS:
        weight = message.get(field, trained)
        if weight is not None and weight != trained:
            raise BadSample(
                f"{where} has {field}={_shown(weight)}; the loss mask is 1 for assistants and 0 for others, other and "
                "fractional weights are not supported: remove the field, or give tokens with a .loss_mask.npy"
            )


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{what}: it is not JSON ({error})") from error


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
