"""Data that changes under its name is noticed: before a run, in it, and between a checkpoint and its resumption."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import ConfigError
from packhorse_service.loading.decode import BlockLoader
from tests.service.corpus import make_plan
from tests.service.shards_on_disk import save_tiny_tokenizer, write_tar


def test_a_loader_started_later_reads_no_other_tokenizer_than_the_server(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.txt", b"the pack horse")])
    file = save_tiny_tokenizer(tmp_path / "tokenizer.json")
    plan = make_plan(tmp_path, {"docs": {"shards": "a.tar"}}, tokenizer={"file": file.name})
    BlockLoader(plan.decoding)
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' has digest .*, expected"):
        BlockLoader(plan.decoding)
