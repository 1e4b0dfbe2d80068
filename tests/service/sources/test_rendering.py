"""Rendering is pure, prints what Hugging Face templates print, and marks exactly what the assistant generates."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.errors import ConfigError, SourceError
from packhorse_service.sources.rendering import CHATML, ChatTemplate
from packhorse_service.sources.sample import BadSample

DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi <|im_end|> there"},
    {"role": "assistant", "content": "hello\n"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "good bye"},
]

NO_OVERRIDES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def marked(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[str]:
    text, spans = template.render(messages, tools)
    return [text[start:end] for start, end in spans]


def render(source: str, messages: list[dict[str, Any]] | None = None, date: str | None = None) -> str:
    return ChatTemplate(source, date).render(messages or [{"role": "user", "content": "x"}])[0]


def test_the_default_template_is_chatml_and_marks_turns_with_their_end() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(DIALOGUE)[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi <|im_end|> there<|im_end|>\n<|im_start|>assistant\nhello\n<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\ngood bye<|im_end|>\n"
    )
    assert marked(template, DIALOGUE) == ["hello\n<|im_end|>", "good bye<|im_end|>"]


def test_the_default_template_writes_tools_and_calls_with_null_content() -> None:
    function = {"name": "weather", "arguments": {"city": "Zürich"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}] * 2},
        {"role": "tool", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    template = ChatTemplate(CHATML)
    assert marked(template, messages, tools) == [f"{call}\n{call}<|im_end|>"]
    text, _ = template.render(messages, tools)
    assert '<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\nsunny<|im_end|>\n")


def test_templates_without_marks_give_the_same_spans_from_prefixes() -> None:
    assert marked(ChatTemplate(NO_OVERRIDES), DIALOGUE) == ["hello\n[end]", "good bye[end]"]


def test_a_template_whose_prefixes_differ_is_refused_with_the_remedy() -> None:
    last_only = "{% for m in messages %}{{ m.content if loop.last else '-' }}{% endfor %}"
    with pytest.raises(SourceError, match=r"put \{% generation %\}") as caught:
        ChatTemplate(last_only).render(DIALOGUE)
    assert not isinstance(caught.value, BadSample)


def test_marks_work_within_macros_and_blocks() -> None:
    source = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% set text %}<{{ turn(m) }}>{% endset %}{{ text }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "é1"}, {"role": "assistant", "content": "2"}]
    assert ChatTemplate(source).render(messages) == ("<é1><2>", ((1, 3), (5, 6)))


def test_text_that_holds_the_internal_marks_is_refused() -> None:
    with pytest.raises(BadSample, match=r"U\+FDD0"):
        ChatTemplate(CHATML).render([{"role": "assistant", "content": "a\ufdd0b"}])


def test_whitespace_and_loop_controls_are_as_hugging_face_has_them() -> None:
    assert (
        render("{% for m in [1, 2, 3] %}\n    {% if m == 2 %}{% break %}{% endif %}\n{{ m }}\n{% endfor %}\n") == "1\n"
    )


def test_json_is_written_without_html_escapes() -> None:
    assert render("{{ {'b': '<é&', 'a': 1} | tojson }}") == '{"b": "<é&", "a": 1}'
    assert render("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, indent=1) }}") == (
        '{\n "a": 1,\n "b": "\\u00e9"\n}'
    )


def test_the_date_is_the_configured_one_and_needed_only_when_called() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert render(source, date="2025-07-26") == "26 Jul 2025"
    assert render("{% if false %}" + source + "{% endif %}ok") == "ok"
    with pytest.raises(ConfigError, match="set date"):
        render(source)
    with pytest.raises(ConfigError, match="date='yesterday'"):
        ChatTemplate(source, "yesterday")


@pytest.mark.parametrize(
    "source", ["{{ [1, 2] | random }}", "{{ lipsum() }}", "{% include 'x' %}", "{{ ''.__class__.__mro__ }}"]
)
def test_templates_cannot_reach_randomness_files_or_internals(source: str) -> None:
    with pytest.raises((BadSample, ConfigError)):
        render(source)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ messages | map(attribute='content') }}", "generator"),
        ("{{ raise_exception }}", "function"),
        ("{{ 'x'.upper }}", "method"),
        ("{{ strftime_now('%s') }}", "another number on each machine"),
    ],
)
def test_what_differs_from_process_to_process_is_never_printed(source: str, named: str) -> None:
    """An address of a function or a generator, and the machine's time zone."""
    with pytest.raises(BadSample, match=named):
        render(source, date="2025-07-26")
    assert render("{{ messages | map(attribute='content') | join }}", [{"role": "user", "content": "a"}]) == "a"


def test_a_template_that_does_not_compile_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_a_refusal_of_the_template_is_the_samples_fault() -> None:
    with pytest.raises(BadSample, match="Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize("printed", ["m.content", "m.content | trim"])
def test_null_content_is_never_written_as_a_word(printed: str) -> None:
    with pytest.raises(BadSample, match="null"):
        render("{% for m in messages %}{{ " + printed + " }}{% endfor %}", [{"role": "user", "content": None}])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(BadSample, match="surrogate"):
        render(NO_OVERRIDES, [{"role": "user", "content": "a\ud800"}])


def test_special_tokens_that_a_template_names_must_be_given() -> None:
    with pytest.raises(ConfigError, match="uses bos_token"):
        ChatTemplate("{{ bos_token }}" + NO_OVERRIDES)
    template = ChatTemplate("{{ bos_token }}" + NO_OVERRIDES, special_tokens={"bos_token": "<s>"})
    assert template.render(DIALOGUE[:1])[0].startswith("<s>[system]")
