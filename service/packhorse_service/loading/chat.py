"""A conversation becomes ids, with proof that what is rendered is what the conversation says.

Whatever is trained on (content, reasoning, calls) stands where the loss is; what else is said stands in the text;
each marker of the template is one token, and each turn that is trained on ends in one that makes a model stop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.tokenizer import Tokenizer
from packhorse_service.sources.formats import TokenArrays
from packhorse_service.sources.messages import Conversation, Message, Role
from packhorse_service.sources.rendering import ChatTemplate, Span
from packhorse_service.sources.sample import BadSample

__all__ = ["ChatEncoder"]

# How templates write what no text holds by chance. Brackets, as of [INST], are plain text for some models.
MARKER = re.compile(r"<\|[^|<>\s]{1,64}\|>|<\uff5c[^\uff5c<>\s]{1,64}\uff5c>|<(?:start|end)_of_turn>|</?s>")

ASKED, ANSWERED = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
PROBES = ([{"role": "system", "content": "x"}, ASKED, ANSWERED, ASKED, ANSWERED], [ASKED, ANSWERED])

# Templates take reasoning that stands in the content apart, and lay it out anew.
THINKING = re.compile(r"</?think>")


class ChatEncoder:
    """Encoder of conversations by one template and one tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._proved = False
        stops = sorted(tokenizer.special_texts, key=len, reverse=True)
        self._stops = tuple(stops)
        self._stop_follows = re.compile(rf"\s*(?:{'|'.join(map(re.escape, stops))})") if stops else None

    def require_markers(self) -> None:
        """Raise ``ConfigError`` unless each marker that the template prints is one token."""
        if self._proved:
            return
        printed = {marker for probe in PROBES for marker in MARKER.findall(self._probe(probe))}
        split = sorted(marker for marker in printed if not self._tokenizer.knows(marker))
        if split:
            raise ConfigError(
                f"chat_template prints {', '.join(map(repr, split))}, which the tokenizer does not read as one token: "
                "it is not this model's template (left out, it is ChatML). Set chat_template to the model's own"
            )
        self._proved = True

    def encode(self, conversation: Conversation) -> TokenArrays:
        """Return ids and loss mask. Raises ``BadSample``, or ``SourceError`` where it is the template's fault."""
        self.require_markers()
        text, spans = self._template.render(conversation.messages, conversation.tools, conversation.untrained)
        text, spans = self._end_turns(text, spans, conversation)
        _require_said(text, spans, conversation)
        return TokenArrays(*self._tokenizer.encode_marked(text, spans))

    def _probe(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages)[0]
        except SourceError:  # some templates want no system turn; what they print of real ones is looked at then
            return ""

    def _end_turns(self, text: str, spans: Sequence[Span], conversation: Conversation) -> tuple[str, tuple[Span, ...]]:
        """Return text and spans in which every turn that is trained on ends in a stop token."""
        ended = []
        turns = sum(message["role"] == Role.ASSISTANT for message in conversation.messages)
        each = len(spans) == turns - len(conversation.untrained)
        for number, (start, end) in enumerate(spans, start=1):
            last = number == len(spans)
            # Where a turn has several marked places, only of the last one it is known to be the end of a turn.
            if (each or last) and not text[start:end].rstrip().endswith(self._stops):
                text, end = self._end_turn(text, end, conversation)
            ended.append((start, end))
        return text, tuple(ended)

    def _end_turn(self, text: str, end: int, conversation: Conversation) -> tuple[str, int]:
        """Return the text, and the end of a turn with the marker that follows it, of a next turn's if need be."""
        if self._stop_follows is not None:
            follows = self._stop_follows.match(text, end)
            if follows is not None:
                return text, follows.end()
            if not text[end:].strip():
                longer = self._probe([*conversation.messages, ASKED]) if conversation.tools is None else ""
                follows = self._stop_follows.match(longer, end)
                if follows is not None and longer.startswith(text[:end]):
                    return longer[: follows.end()], follows.end()
        raise SourceError(
            f"chat_template: the turn that ends in {text[:end][-30:]!r} is trained on and has no special token of "
            "the tokenizer at its end, so nothing would teach the model to stop; print eos_token or the model's end of "
            "turn there"
        )


def _require_said(text: str, spans: Sequence[Span], conversation: Conversation) -> None:
    """Raise ``BadSample`` where something that the conversation says was not printed."""
    trained = [
        number
        for number, message in enumerate(conversation.messages)
        if message["role"] == Role.ASSISTANT and number not in conversation.untrained
    ]
    regions = [text[start:end] for start, end in spans]
    if len(regions) != len(trained):
        regions = ["".join(regions)] * len(trained)
    places = dict(zip(trained, regions, strict=True))
    for number, message in enumerate(conversation.messages):
        if message["role"] == Role.ASSISTANT and number not in places:
            continue
        for what, said in _said(message):
            if not _holds(places.get(number, text), said):
                where = "what it marks as generated" if number in places else "its text"
                raise BadSample(
                    f"the chat template does not print the {what} of message {number + 1} ({message['role']}) in "
                    f"{where}: {said[:40]!r}; use a template for training that prints all of it, or remove the field"
                )


def _said(message: Message) -> Iterator[tuple[str, str]]:
    """Yield all texts of a message, each with what it is."""
    for part in THINKING.split(message["content"] or ""):
        yield "content", part.strip()
    yield "reasoning_content", message.get("reasoning_content", "").strip()
    if message["role"] != Role.TOOL:
        yield "name", message.get("name", "")
    for call in message.get("tool_calls", ()):
        yield "call", call["function"]["name"]
        for leaf in _leaves(call["function"]["arguments"]):
            yield "call's argument", leaf


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _leaves(part)
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _holds(text: str, said: str) -> bool:
    """Return whether ``text`` holds what is ``said``, plainly or as JSON."""
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text or json.dumps(said)[1:-1] in text
