"""Two servers offer the same stream where data and settings are the same, wherever the data lies."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from packhorse_service.snapshot.fingerprint import StreamFingerprint
from tests.service.corpus import make_plan, write_source
from tests.service.shards_on_disk import save_tiny_tokenizer

ORDER = {"manifest": [["docs", [["a.tar", 10]]]], "mixing": {"seed": 0}}
ROWS = {"packing": {"capacity": 8}}


# Any of these changed makes another stream. The value: the parts of the fingerprint that must say so.
CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "seed": ({"seed": 1}, ["order"]),
    "date": ({"date": "2026-01-02"}, ["date"]),
    "a tokenizer": ({"tokenizer": "tokenizer.json"}, ["tokenizer"]),
    "weight": ({"sources": {"docs": {"weight": 3}}}, ["mixture"]),
    "epochs": ({"sources": {"docs": {"epochs": 2}}}, ["mixture"]),
    "endless": ({"sources": {"docs": {"epochs": "endless"}}}, ["mixture"]),
    "shuffle": ({"sources": {"docs": {"shuffle": False}}}, ["order"]),
    "open_shards": ({"sources": {"docs": {"open_shards": 1}}}, ["order"]),
    "over_length": ({"sources": {"docs": {"over_length": "split"}}}, ["over_length"]),
    "unsupervised": ({"sources": {"docs": {"unsupervised": "drop"}}}, ["over_length"]),
    "skip_budget": ({"sources": {"docs": {"skip_budget": 1}}}, ["over_length"]),
    "format": ({"sources": {"docs": {"format": "tokens"}}}, ["rendering"]),
    "chat_template": ({"sources": {"docs": {"chat_template": "chat.jinja"}}}, ["rendering"]),
    "mixing by samples": ({"mixing": {"by": "samples"}}, ["mixture"]),
    "stopping with the first source": ({"mixing": {"on_end": "stop"}}, ["mixture"]),
    "fewer shards": ({"sources": {"docs": {"shards": "docs/part-000.tar"}}}, ["manifest", "order"]),
    "another order of shards": (
        {"sources": {"docs": {"shards": ["docs/part-001.tar", "docs/part-000.tar"]}}},
        ["manifest"],
    ),
    "block_bytes": ({"loading": {"workers": 0, "block_bytes": 1000}}, ["blocks"]),
}
ROW_CHANGES: dict[str, dict[str, Any]] = {
    "seq_length": {"contract": {"seq_length": 128}},
    "global_batch_size": {"contract": {"global_batch_size": 8}},
    "segment_multiple": {"contract": {"segment_multiple": 2}},
    "pack_multiple": {"contract": {"pack_multiple": 2}},
    "tail_padding": {"contract": {"tail_padding": "extend_last"}},
    "pad_to_max_length": {"contract": {"pad_to_max_length": False}},
    "remainder": {"contract": {"remainder": "drop"}},
    "vocab_size": {"contract": {"vocab_size": 64_000}},
    "pad_id": {"contract": {"pad_id": 1}},
    "lookahead": {"packing": {"lookahead": 9}},
    "max_segments": {"contract": {"max_segments": 3}},
    "window": {"packing": {"window": 2}},
    "hidden_size": {"packing": {"hidden_size": 64}},
    "data parallel": {"layout": {"data": 2}},
    "keys": {"keys": True},
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two sources, a tokenizer and a template."""
    folder = tmp_path / "data"
    write_source(folder / "docs", [[5, 6], [7, 8]])
    write_source(folder / "web", [[9]], first=100)
    save_tiny_tokenizer(folder / "tokenizer.json")
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def fingerprint_of(base: Path, changes: Mapping[str, Any] | None = None) -> StreamFingerprint:
    given = dict(changes or {})
    sources: dict[str, dict[str, object]] = {
        "docs": {"shards": "docs/part-{000..001}.tar"},
        "web": {"shards": "web/part-000.tar"},
    }
    for name, of_source in given.pop("sources", {}).items():
        sources[name] |= of_source
    return make_plan(base, sources, **given).fingerprint


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_order_of_samples_changes_the_fingerprint_and_is_named(data: Path, change: str) -> None:
    changes, parts = CHANGES[change]
    before, after = fingerprint_of(data), fingerprint_of(data, changes)
    assert list(after.differing(before.encoded_parts())) == parts
    assert after.digest != before.digest


@pytest.mark.parametrize("change", ROW_CHANGES)
def test_what_changes_rows_alone_changes_the_fingerprint_and_no_snapshot(data: Path, change: str) -> None:
    before, after = fingerprint_of(data), fingerprint_of(data, ROW_CHANGES[change])
    assert after.digest != before.digest
    assert list(after.differing(before.encoded_parts())) == []


def test_a_source_of_another_name_is_another_stream(data: Path) -> None:
    docs: dict[str, object] = {"shards": "docs/part-000.tar"}
    one, other = (make_plan(data, {name: docs}).fingerprint for name in ("docs", "texts"))
    assert "manifest" in one.differing(other.encoded_parts())


def test_the_path_of_the_data_does_not_matter(data: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "deeper"
    shutil.copytree(data, moved, copy_function=shutil.copyfile)  # with other times, too
    assert fingerprint_of(moved) == fingerprint_of(data)
    assert fingerprint_of(moved).digest == fingerprint_of(data).digest


def test_workers_do_not_matter(data: Path) -> None:
    assert fingerprint_of(data, {"loading": {"workers": 3, "block_bytes": 4096}}) == fingerprint_of(data)


def test_a_shard_of_another_size_is_another_manifest(data: Path) -> None:
    before = fingerprint_of(data)
    write_source(data / "docs", [[5, 6], [7] * 20])
    assert list(fingerprint_of(data).differing(before.encoded_parts())) == ["manifest"]


def test_another_tokenizer_under_the_same_name_is_another_stream(data: Path) -> None:
    before = fingerprint_of(data, {"tokenizer": "tokenizer.json"})
    path = data / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert list(fingerprint_of(data, {"tokenizer": "tokenizer.json"}).differing(before.encoded_parts())) == [
        "tokenizer"
    ]


def test_another_template_under_the_same_name_is_another_stream(data: Path) -> None:
    changes = {"sources": {"docs": {"chat_template": "chat.jinja"}}}
    before = fingerprint_of(data, changes)
    (data / "chat.jinja").write_text("{{ messages }}")
    assert list(fingerprint_of(data, changes).differing(before.encoded_parts())) == ["rendering"]


def test_special_tokens_are_part_of_the_tokenizer(data: Path) -> None:
    plain, with_end = (
        fingerprint_of(data, {"tokenizer": {"file": "tokenizer.json"} | more})
        for more in ({}, {"eos_token": "<|endoftext|>"})
    )
    assert list(with_end.differing(plain.encoded_parts())) == ["tokenizer"]


def test_the_order_in_which_parts_are_given_does_not_matter() -> None:
    backwards = StreamFingerprint.of(dict(reversed(ORDER.items())), ROWS)
    assert backwards.digest == StreamFingerprint.of(ORDER, ROWS).digest
    assert backwards.encoded_parts() == StreamFingerprint.of(ORDER, ROWS).encoded_parts()


def test_all_parts_that_differ_are_named() -> None:
    other = StreamFingerprint.of({"manifest": [], "mixing": {"seed": 1}}, ROWS)
    assert list(other.differing(StreamFingerprint.of(ORDER, ROWS).encoded_parts())) == ["manifest", "mixing"]
    assert list(other.differing(b"")) == ["manifest", "mixing"]


def test_the_fingerprint_of_a_description_never_changes() -> None:
    assert StreamFingerprint.of(ORDER, ROWS).digest.hex() == GOLDEN_FINGERPRINT


GOLDEN_FINGERPRINT = "36e37906802d44fdc21aa27f28cf9989"
