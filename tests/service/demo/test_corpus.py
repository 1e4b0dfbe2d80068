"""The demo's data: the standard library's own text, the same on every run."""

from __future__ import annotations

import inspect
import json
import sys
import tarfile
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from packhorse_service.demo.corpus import SPECIAL_TOKENS, Corpus, CorpusSizes, make_corpus

SIZES = CorpusSizes(source=900_000, docs=60_000, chat=60_000, longest_chat=300, vocabulary=600)


def make(folder: Path) -> Corpus:
    folder.mkdir()
    return make_corpus(folder, SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "first"
    make(folder)
    return folder


def members(folder: Path, pattern: str) -> dict[str, str]:
    """Name → content of all members of the shards."""
    found = {}
    for path in sorted(folder.glob(pattern)):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                found[member.name] = content.read().decode()
    return found


def conversations(folder: Path) -> dict[str, tuple[str, str]]:
    """Dotted name → (question, answer)."""
    found = {}
    for name, content in members(folder, "chat-*.tar").items():
        question, answer = json.loads(content)["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        found[name.removesuffix(".json").replace("/", ".")] = question["content"], answer["content"]
    return found


def test_two_runs_make_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make(tmp_path / "second")
    first, second = ({path.name: path.read_bytes() for path in at.iterdir()} for at in (folder, tmp_path / "second"))
    assert first == second
    assert {"docs-000000.tar", "docs-000003.tar", "chat-000000.tar", "chat-000003.tar", "tokenizer.json"} <= set(first)


def test_documents_are_source_and_reference_text(folder: Path) -> None:
    documents = members(folder, "docs-*.tar")
    assert all(name.endswith(".txt") and text for name, text in documents.items())
    assert {name.partition("/")[0] for name in documents} == {"source", "docs"}


def test_the_counts_are_those_of_the_shards(tmp_path: Path) -> None:
    corpus = make(tmp_path / "counted")
    documents, chats = members(tmp_path / "counted", "docs-*.tar"), members(tmp_path / "counted", "chat-*.tar")
    characters = sum(map(len, [*documents.values(), *chats.values()]))
    assert corpus == Corpus(documents=len(documents), chats=len(chats), characters=characters)


def test_answers_are_the_docstrings_of_the_functions_asked_about(folder: Path) -> None:
    checked = 0
    for name, (question, answer) in conversations(folder).items():
        module, _, path = name.partition(".")
        found: object = sys.modules.get(module)  # only what is imported already: some modules act when imported
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, types.FunctionType) and f"{found.__module__}.{found.__qualname__}" == name:
            assert answer == inspect.getdoc(found)
            assert question.startswith(f"What does {name}(")
            checked += 1
    assert checked >= 5


def test_no_chat_can_exceed_the_bound_in_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for question, answer in conversations(folder).values():
        assert len(tokenizer.encode(question).ids) + len(tokenizer.encode(answer).ids) <= SIZES.longest_chat


def test_the_tokenizer_knows_the_special_tokens_and_loses_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SIZES.vocabulary
    assert [tokenizer.encode(token).tokens for token in SPECIAL_TOKENS] == [[token] for token in SPECIAL_TOKENS]
    text = "def f(x):\n\treturn 'é≈🙂'  # \x00\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
