"""Real tars and tokenizers for the tests of the reading side."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.sources.npy import dump_array
from packhorse_service.sources.shards import Shard

Files = Iterable[tuple[str, bytes]]


def write_tar(path: Path, files: Files, tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write ``files`` (name, data) as a tar, in that order."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in files:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def ids_member(ids: Sequence[int], dtype: str = "<i4") -> bytes:
    """Return an ``.npy`` file of ``ids``."""
    return dump_array(np.array(ids, dtype=dtype))


def shard_at(path: Path) -> Shard:
    return Shard(path.name, str(path), path.stat().st_size)


def load_all(loader: BlockLoader, source: str, shard: Shard) -> list[TokenBlock]:
    """Load a whole shard, block by block."""
    blocks: list[TokenBlock] = []
    offset: int | None = 0
    while offset is not None:
        first = sum(block.count for block in blocks)
        blocks.append(loader.load(BlockRequest(source, shard, offset, first)))
        offset = blocks[-1].next_offset
    return blocks


def load_block(path: Path, **settings: object) -> TokenBlock:
    """Load the first block of the shard at ``path``; ``settings`` are those of ``DecodingSpec``."""
    spec = DecodingSpec(name="test", **settings)  # type: ignore[arg-type]
    return BlockLoader({"test": spec}).load(BlockRequest("test", shard_at(path), 0, 0))


def save_tiny_tokenizer(path: Path) -> Path:
    """Train a byte-level BPE of 280 tokens, with ChatML's and an end-of-text token, and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the pack horse carries the packs to the trainers\n" * 4], trainer)
    tokenizer.save(str(path))
    return path
