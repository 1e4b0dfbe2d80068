"""What a conversation says is in what is trained on, and a turn ends where the model must stop, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.decode import ContentEncoder, DecodingSpec
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from packhorse_service.sources.messages import parse_conversation
from packhorse_service.sources.sample import BadSample
from tests.shared_data import shared

DIALOGUE = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "How"},
    {"role": "assistant", "content": "fine"},
]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# A turn has no end of its own: the next role's marker is where the model stops.
UNENDED = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}" + PROMPT.replace("assistant\n", "")


def trained(tokenizer: Path, messages: list[dict[str, Any]], template: str | None = None) -> list[str]:
    """The texts that are trained on, run by run."""
    spec = TokenizerSpec(file=str(tokenizer), eos_token="<|endoftext|>")
    encoder = ContentEncoder(DecodingSpec(name="chat", tokenizer=spec, chat_template=template))
    ids, mask, _ = encoder.encode(parse_conversation(messages))
    assert mask is not None
    decode = Tokenizer(spec).decode
    runs: list[list[int]] = [[]]
    for token, on in zip(ids.tolist(), mask.tolist(), strict=True):
        if on:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [decode(run) for run in runs if run]


def test_every_trained_turn_ends_in_its_stop_token(tiny_tokenizer: Path) -> None:
    ended = ["Hi<|im_end|>", "fine<|im_end|>"]
    assert trained(tiny_tokenizer, DIALOGUE) == ended
    assert [text.rstrip() for text in trained(tiny_tokenizer, DIALOGUE, TURNS + PROMPT)] == ended


def test_a_turn_that_ends_with_the_next_roles_marker_gets_that_marker(tiny_tokenizer: Path) -> None:
    assert trained(tiny_tokenizer, DIALOGUE, UNENDED) == ["Hi<|im_start|>", "fine<|im_start|>"]
    outside = TURNS.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert trained(tiny_tokenizer, DIALOGUE[1:2], outside) == ["Hi<|im_end|>"]


@pytest.mark.parametrize("end", ["", "\n", "[end]", "###"])
def test_a_template_whose_turns_end_in_no_stop_token_is_refused(tiny_tokenizer: Path, end: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(SourceError, match="teach the model to stop") as caught:
        trained(tiny_tokenizer, DIALOGUE, template)
    assert not isinstance(caught.value, BadSample)


@pytest.mark.parametrize(
    "marker", ["<|user|>", "<|eot_id|>", "<start_of_turn>", "<\uff5cUser\uff5c>", "</s>", "<|{{ m.role }}|>"]
)
def test_a_template_whose_markers_are_no_tokens_is_refused(tiny_tokenizer: Path, marker: str) -> None:
    template = "{% for m in messages %}" + marker + "{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="does not read as one token"):
        ContentEncoder(
            DecodingSpec(name="s", tokenizer=TokenizerSpec(file=str(tiny_tokenizer)), chat_template=template)
        )


def test_chatml_is_the_default_only_where_its_markers_are_tokens() -> None:
    spec = TokenizerSpec(file=str(shared("data/tokenizers/torchtitan_tiny_tokenizer.json")))
    encoder = ContentEncoder(DecodingSpec(name="s", tokenizer=spec))
    encoder.encode("a text needs no template")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>'.*does not read as one token"):
        encoder.encode(parse_conversation(DIALOGUE))


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"content": "a", "reasoning_content": "because"}, "reasoning_content"),
        ({"content": "<think>because</think>a"}, "content"),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y1"}}}]}, "call"),
        ({"content": "a", "name": "eve"}, "name"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tiny_tokenizer: Path, message: dict[str, Any], what: str) -> None:
    drops = TURNS.replace("m.content", "(m.content or '').split('</think>')[-1]") + PROMPT
    with pytest.raises(BadSample, match=f"does not print the {what} of message 2"):
        trained(tiny_tokenizer, [DIALOGUE[0], {"role": "assistant"} | message], drops)
    assert trained(tiny_tokenizer, [DIALOGUE[0], {"role": "assistant", "weight": 0} | message], drops) == []


def test_a_turn_of_others_that_is_left_out_is_refused(tiny_tokenizer: Path) -> None:
    no_system = TURNS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}") + PROMPT
    with pytest.raises(BadSample, match=r"content of message 1 \(system\)"):
        trained(tiny_tokenizer, [{"role": "system", "content": "Be brief."}, *DIALOGUE], no_system)


def test_the_default_template_prints_reasoning_and_calls_and_trains_on_them(tiny_tokenizer: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"q": 'say "é"\n', "n": 1.5, "l": [True, None, {"k": "v"}]}}}
    answer = {"role": "assistant", "content": "a", "reasoning": "because", "tool_calls": [call]}
    [text] = trained(tiny_tokenizer, [DIALOGUE[0], answer])
    assert text.startswith("<think>\nbecause\n</think>\n\na\n<tool_call>\n")
    assert text.endswith("</tool_call><|im_end|>")


def test_turns_that_are_not_to_be_trained_on_are_not_whatever_the_template(tiny_tokenizer: Path) -> None:
    masked: list[dict[str, Any]] = [DIALOGUE[0], DIALOGUE[1] | {"weight": 0}, *DIALOGUE[2:]]
    for template in (None, TURNS + PROMPT):
        assert [text.rstrip() for text in trained(tiny_tokenizer, masked, template)] == ["fine<|im_end|>"]
