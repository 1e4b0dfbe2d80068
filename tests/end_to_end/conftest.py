"""Shards that the tests from outside serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.service.shards_on_disk import ids_member, save_tiny_tokenizer, write_tar

VOCAB_SIZE = 1000


@pytest.fixture
def token_shards(tmp_path: Path) -> Path:
    """Four shards of 60 samples, with a long tail of lengths; some carry a loss mask."""
    generator = np.random.default_rng(7)
    for number in range(4):
        files: list[tuple[str, bytes]] = []
        for i in range(60):
            length = int(np.clip(generator.lognormal(3.5, 1.0), 2, 250))
            files.append((f"{number}-{i}.npy", ids_member(generator.integers(1, VOCAB_SIZE, length).tolist())))
            if i % 3 == 0:
                files.append((f"{number}-{i}.loss_mask.npy", ids_member(generator.integers(0, 2, length).tolist())))
        write_tar(tmp_path / f"a-{number:06d}.tar", files)
    return tmp_path


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder with ``tokenizer.json``."""
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path
