"""Fixtures that several tests of the service share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.shards_on_disk import save_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer file of 280 byte-level tokens, which knows ChatML's special tokens."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
