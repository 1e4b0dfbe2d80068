"""The demo's data, made from the Python standard library of this machine.

    docs-000000.tar …   KEY.txt    the source of one definition, or one topic of Python's own documentation
    chat-000000.tar …   KEY.json   {"messages": […]}: a function's signature as question, its docstring as answer
    tokenizer.json                 a byte-level BPE trained on both

Modules are parsed, never imported. What is taken, and in which order, comes from digests of the names: a mixture
that is the same on every run on one machine.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import tokenizers

from packhorse.rounding import ceil_div

__all__ = ["SPECIAL_TOKENS", "Corpus", "CorpusSizes", "make_corpus"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # what the built-in chat template (ChatML) writes
TOPICS = "pydoc_data/topics.py"  # the language reference, as `help("assert")` prints it
LONGEST_DOCUMENT = 24_000  # characters; a longer one would be a tenth of this small corpus
SHARDS = 4  # of each source


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSizes:
    """Sizes of the corpus to make. Characters of source to read, then of documents and chats to keep.

    ``longest_chat`` counts bytes of a question and its answer: a token is at least one byte, so this bounds a
    chat's tokens too.
    """

    source: int = 1_800_000
    docs: int = 520_000
    chat: int = 230_000
    longest_chat: int = 900
    vocabulary: int = 2048


class Corpus(NamedTuple):
    """Shards, tokenizer and counts that the corpus was made of."""

    documents: int
    chats: int
    characters: int


def make_corpus(folder: Path, sizes: CorpusSizes) -> Corpus:
    """Write the shards and the tokenizer into ``folder``, which must exist."""
    documents: dict[str, str] = {}
    chats: dict[str, str] = {}
    for module, source in _modules(sizes.source):
        tree = ast.parse(source)
        documents |= _definitions(module, source, tree)
        chats |= _chats(module, tree, sizes.longest_chat)
    documents = _take(documents | _topics(), sizes.docs)
    chats = _take(chats, sizes.chat)
    _write_shards(folder / "docs-%06d.tar", "txt", documents)
    _write_shards(folder / "chat-%06d.tar", "json", chats)
    texts = [*documents.values(), *chats.values()]
    _train_tokenizer(texts, sizes.vocabulary).save(str(folder / "tokenizer.json"))
    return Corpus(len(documents), len(chats), sum(map(len, texts)))


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _modules(characters: int) -> Iterator[tuple[str, str]]:
    """(name, source) of top-level modules, until ``characters`` have been read."""
    for path in sorted(_stdlib().glob("*.py"), key=lambda path: _digest(path.stem)):
        if characters <= 0:
            return
        source = path.read_text(encoding="utf-8")
        characters -= len(source)
        yield path.stem, source


def _definitions(module: str, source: str, tree: ast.Module) -> dict[str, str]:
    """Key → source of each function and class at the top level of a module."""
    lines = source.splitlines(keepends=True)
    return {
        f"source/{module}/{node.name}": "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def _topics() -> dict[str, str]:
    """Key → text of each topic of the language reference; the file is one dictionary of them."""
    tree = ast.parse((_stdlib() / TOPICS).read_text(encoding="utf-8"))
    dictionary = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    return {f"docs/{name}": text for name, text in ast.literal_eval(dictionary).items()}


def _chats(module: str, tree: ast.Module, longest: int) -> dict[str, str]:
    """Key → conversation as JSON for each documented function of a module, methods included."""
    chats = {}
    for name, node in _functions(tree.body, module):
        answer = ast.get_docstring(node)
        question = f"What does {name}({ast.unparse(node.args)}) do?"
        if answer and len((question + answer).encode()) <= longest:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            chats[name.replace(".", "/")] = json.dumps({"messages": turns}, ensure_ascii=False)
    return chats


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}.{node.name}")


def _take(texts: Mapping[str, str], characters: int) -> dict[str, str]:
    """Texts in the order of their digests, until they make up ``characters``."""
    taken: dict[str, str] = {}
    for key in sorted(texts, key=_digest):
        if characters <= 0:
            break
        if len(texts[key]) <= LONGEST_DOCUMENT:
            taken[key] = texts[key]
            characters -= len(texts[key])
    return taken


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _write_shards(pattern: Path, extension: str, texts: Mapping[str, str]) -> None:
    import webdataset  # loads torch, seconds that only this step should take

    per_shard = ceil_div(len(texts), SHARDS)
    with webdataset.ShardWriter(str(pattern), maxcount=per_shard, verbose=0, mtime=0) as shards:
        for key, text in texts.items():
            shards.write({"__key__": key, extension: text.encode()})


def _train_tokenizer(texts: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
