"""Chat templates: a conversation becomes text, and the ranges of it that are trained on.

Templates are those of Hugging Face tokenizers, rendered in a jinja sandbox that is pure: no clock, no
randomness, no files. ``strftime_now`` gives the configured date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from types import MappingProxyType

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packhorse.errors import ConfigError, SourceError
from packhorse_service.sources.messages import Message, Role
from packhorse_service.sources.sample import BadSample

__all__ = ["CHATML", "ChatTemplate", "Span"]

CHATML = files(__package__).joinpath("chatml.jinja").read_text(encoding="utf-8")

Span = tuple[int, int]  # [start, end) in characters of the rendered text

# Unicode keeps noncharacters for a program's own use. They stand around generated text while a template runs,
# which unlike counting output also works within macros and `set` blocks.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")

# What template code can raise on data it does not expect, besides jinja's own errors.
DATA_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


class ChatTemplate:
    """A chat template, compiled: it renders conversations to text.

    ``date`` (YYYY-MM-DD) is what ``strftime_now`` gives; ``special_tokens`` holds the texts of ``bos_token``,
    ``eos_token`` … that the template may name. Raises ``ConfigError`` for a template that does not compile,
    a date that is none, or a special token that the template names and nobody gave: it would print nothing.
    """

    def __init__(
        self, source: str, date: str | None = None, special_tokens: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        environment = _environment(_clock(date))
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat_template does not compile: {error}") from error
        named = jinja2.meta.find_undeclared_variables(tree).intersection(SPECIAL_TOKENS)
        for token in sorted(named.difference(special_tokens)):
            raise ConfigError(
                f"chat_template uses {token}, which is not set; set {token} for the tokenizer ('' for none)"
            )
        self._special_tokens = dict(special_tokens)
        self._has_marks = any(
            attribute.identifier == GenerationExtension.identifier
            for attribute in tree.find_all(nodes.ExtensionAttribute)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        untrained: Collection[int] = (),
    ) -> tuple[str, tuple[Span, ...]]:
        """Return the text of a conversation and the spans of it that the assistant generates, in order.

        Without those of the messages ``untrained``, by their numbers.

        The spans are the template's ``{% generation %}`` blocks. A template without any is rendered for
        every prefix of the conversation, and an assistant's turn is what it adds after the generation
        prompt, the end-of-turn token included.

        Raises ``BadSample`` when the template refuses the conversation, ``SourceError`` when it has no
        marks and its prefixes are not prefixes, ``ConfigError`` when it asks for a date that is not set.
        """
        if not self._has_marks:
            text = self._run(messages, tools)
            return text, tuple(self._derive_spans(text, messages, tools, untrained))
        if any(mark in json.dumps([messages, tools], ensure_ascii=False) for mark in (OPEN, CLOSE)):
            raise BadSample("its text holds U+FDD0 or U+FDD1, which Unicode reserves for internal use; remove them")
        text, spans = _take_marks(self._run(messages, tools))
        return text, _without(untrained, spans, messages) if untrained else spans

    def _derive_spans(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        untrained: Collection[int],
    ) -> list[Span]:
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != Role.ASSISTANT or index in untrained:
                continue
            before = self._run(messages[:index], tools, add_generation_prompt=True)
            after = self._run(messages[: index + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise SourceError(
                    f"chat_template: what it renders for the first {index + 1} messages does not begin what it renders "
                    "for all of them, so the assistant's text cannot be told apart; put {% generation %} … "
                    "{% endgeneration %} around it in the template"
                )
            spans.append((len(before), len(after)))
        return spans

    def _run(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            text.encode("utf-8")  # JSON can escape half a surrogate pair, which is not text
        except ConfigError:
            raise
        except DATA_ERRORS as error:
            raise BadSample(f"the chat template cannot render it: {error}") from error
        return text


class GenerationExtension(Extension):
    """``{% generation %} … {% endgeneration %}`` puts ``OPEN`` and ``CLOSE`` around what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


def _environment(clock: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[LoopControlExtension, GenerationExtension],
        finalize=_refuse_what_is_no_text,
    )
    environment.globals.pop("lipsum")
    environment.filters.pop("random")
    environment.filters["tojson"] = _to_json
    environment.filters["trim"] = _trim
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = clock
    return environment


def _clock(date: str | None) -> Callable[[str], str]:
    if date is None:
        return _no_date
    try:
        day = datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise ConfigError(f"date={date!r} must be a date as YYYY-MM-DD") from error

    def strftime(form: str) -> str:
        if "%s" in form:  # seconds since 1970, by the machine's time zone
            raise jinja2.TemplateError("strftime_now('%s') is another number on each machine; print the date")
        return day.strftime(form)

    return strftime


def _no_date(_format: str) -> str:
    raise ConfigError("chat_template calls strftime_now and date is not set; set date (YYYY-MM-DD) for this source")


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


PRINTABLE = (str, int, float, list, tuple, dict, jinja2.Undefined)


def _refuse_none(value: object) -> object:
    """Refuse null: printing it would write the word "None" into the training text."""
    if value is None:
        raise jinja2.TemplateError("it prints a null value as text (content that is null?)")
    return value


def _refuse_what_is_no_text(value: object) -> object:
    """Refuse a function or a generator: its printed address is another one in each process."""
    if not isinstance(_refuse_none(value), PRINTABLE):
        raise jinja2.TemplateError(f"it prints a {type(value).__name__}, which is no text (a filter without join?)")
    return value


def _trim(value: object, characters: str | None = None) -> str:
    """Jinja's ``trim``, without turning null into the word "None"."""
    return jinja2.filters.do_trim(str(_refuse_none(value)), characters)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as Hugging Face has it: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _without(untrained: Collection[int], spans: tuple[Span, ...], messages: Sequence[Message]) -> tuple[Span, ...]:
    """Return ``spans`` without those of some assistant's messages."""
    speaking = [number for number, message in enumerate(messages) if message["role"] == Role.ASSISTANT]
    if len(spans) != len(speaking):
        raise SourceError(
            f"chat_template: it marks {len(spans)} places in {len(speaking)} turns of the assistant, so those that are "
            "not to be trained on cannot be told apart; mark each turn once with {% generation %} … {% endgeneration %}"
        )
    return tuple(span for number, span in zip(speaking, spans, strict=True) if number not in untrained)


def _take_marks(marked: str) -> tuple[str, tuple[Span, ...]]:
    """Remove the marks from ``marked`` and return where they stood."""
    plain, spans = [], []
    length = 0
    for number, piece in enumerate(marked.replace(CLOSE, OPEN).split(OPEN)):
        if number % 2:
            spans.append((length, length + len(piece)))
        plain.append(piece)
        length += len(piece)
    return "".join(plain), tuple(spans)
