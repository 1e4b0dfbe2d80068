"""Tiny shards for any configuration: whatever names its sources give, in the format that each is meant for."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from braceexpand import braceexpand

from packhorse_service.config.serve_config import ServeConfig, SourceConfig, load_config
from tests.service.shards_on_disk import Files, ids_member, save_tiny_tokenizer, write_tar

__all__ = ["trained_targets", "write_corpus"]

SAMPLES = 24  # of a shard
VOCABULARY = 250


def write_corpus(config: Path) -> None:
    """Beside a configuration, all that it reads: a tokenizer, and a shard for each name of its sources."""
    described = load_config(config)
    save_tiny_tokenizer(config.parent / "tokenizer.json")
    generator = np.random.default_rng(3)
    for name, source in _sources(described):
        for path in _shards(config.parent, source):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tar(path, KINDS[name](generator))


def trained_targets(folder: Path) -> int:
    """How many targets of all shards of ids in a folder are trained on: an id is the target of the one before it."""
    total = 0
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            masks = (tar.extractfile(member) for member in tar if "loss_mask" in member.name)
            total += sum(int(np.load(io.BytesIO(mask.read()))[1:].sum()) for mask in masks if mask)
    return total


def _sources(described: ServeConfig) -> Iterator[tuple[str, SourceConfig]]:
    yield from described.sources.items()
    for stream in described.streams.values():
        yield from stream.sources.items()


def _shards(folder: Path, source: SourceConfig) -> Iterator[Path]:
    for pattern in source.shards:
        for name in braceexpand(pattern):
            yield folder / name.replace("*", "000000")


def _chats(generator: np.random.Generator) -> Files:
    for number in range(SAMPLES):
        answer = "the packs " * int(generator.integers(1, 60))
        messages = [{"role": "user", "content": "What does it carry?"}, {"role": "assistant", "content": answer}]
        yield f"{number}.json", json.dumps({"messages": messages}).encode()


def _documents(generator: np.random.Generator) -> Files:
    for number in range(SAMPLES):
        yield f"{number}.txt", b"the pack horse " * int(generator.integers(1, 2000))


def _ids(generator: np.random.Generator) -> Files:
    for number in range(SAMPLES):
        ids = generator.integers(1, VOCABULARY, generator.integers(2, 3000)).tolist()
        yield f"{number}.npy", ids_member(ids)
        yield f"{number}.loss_mask.npy", ids_member([int(i % 3 > 0) for i in range(len(ids))])


def _plain_ids(generator: np.random.Generator) -> Files:
    return [(name, data) for name, data in _ids(generator) if "mask" not in name]


# name of a source -> what it holds
KINDS: dict[str, Callable[[np.random.Generator], Files]] = {
    "chat": _chats,
    "books": _documents,
    "instructions": _ids,
    **dict.fromkeys(("web", "code", "papers"), _plain_ids),
}
