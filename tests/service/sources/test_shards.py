"""Patterns become shards with stable names and order, or an error that names the pattern."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from packhorse.errors import SourceError
from packhorse_service.sources.shards import expand_shards, open_shard


def make(base: Path, *names: str) -> None:
    for name in names:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def names_of(base: Path, *patterns: str) -> list[str]:
    return [shard.name for shard in expand_shards(patterns, base)]


def test_braces_keep_the_order_written_and_globs_are_sorted(tmp_path: Path) -> None:
    make(tmp_path, "d-000002.tar", "d-000000.tar", "d-000001.tar")
    assert names_of(tmp_path, "d-{000002..000000}.tar") == ["d-000002.tar", "d-000001.tar", "d-000000.tar"]
    assert names_of(tmp_path, "d-*.tar") == ["d-000000.tar", "d-000001.tar", "d-000002.tar"]
    assert names_of(tmp_path, "d-000001.tar", "d-{000002,000000}.tar")[0] == "d-000001.tar"


def test_names_do_not_depend_on_where_the_data_lies(tmp_path: Path) -> None:
    for root in ("here", "else/where"):
        make(tmp_path / root, "en/a.tar", "de/a.tar")
        assert names_of(tmp_path / root, "*/a.tar") == ["de/a.tar", "en/a.tar"]
        assert names_of(tmp_path, f"{root}/{{en,de}}/a.tar") == ["en/a.tar", "de/a.tar"]
        assert names_of(tmp_path, str(tmp_path / root / "en/a.tar")) == ["a.tar"]


def test_a_base_folder_with_wildcard_characters_is_only_a_folder(tmp_path: Path) -> None:
    make(tmp_path / "run[1]*", "a.tar")
    assert names_of(tmp_path / "run[1]*", "*.tar") == ["a.tar"]


def test_a_file_whose_name_has_wildcard_characters_is_found_as_written(tmp_path: Path) -> None:
    make(tmp_path, "a[1].tar")
    assert names_of(tmp_path, "a[1].tar") == ["a[1].tar"]


def test_shards_open_at_any_offset(tmp_path: Path) -> None:
    make(tmp_path, "abcdef.tar")
    [local] = expand_shards(["abcdef.tar"], tmp_path)
    [by_url] = expand_shards([f"file://{tmp_path}/abcdef.tar"], tmp_path)
    assert (local.size, by_url.size) == (10, 10)
    for shard in (local, by_url):
        with open_shard(shard) as stream:
            stream.seek(2)
            assert stream.read() == b"cdef.tar"


def test_urls_are_listed_and_opened_through_fsspec(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for number in range(2):
        system.pipe_file(f"/shards-test/d-{number}.tar", b"12345")
    for pattern in ("memory://shards-test/d-*.tar", "memory://shards-test/d-{0..1}.tar"):
        shards = expand_shards([pattern], tmp_path)
        assert [shard.name for shard in shards] == ["d-0.tar", "d-1.tar"]
        with open_shard(shards[1]) as stream:
            stream.seek(3)
            assert stream.read() == b"45"
    with pytest.raises(SourceError, match=r"shard 'd-7\.tar'.*no file"):
        expand_shards(["memory://shards-test/d-7.tar"], tmp_path)


def test_a_missing_shard_is_named_with_its_pattern(tmp_path: Path) -> None:
    make(tmp_path, "d-0.tar")
    with pytest.raises(SourceError, match=r"shard 'd-1\.tar'.*no file.*d-\{0\.\.1\}\.tar"):
        expand_shards(["d-{0..1}.tar"], tmp_path)


@pytest.mark.parametrize(
    ("patterns", "error"),
    [
        ([], "the list is empty"),
        (["none-*.tar"], r"nothing matches 'none-\*\.tar'"),
        (["memory://shards-test-none/*.tar"], "nothing matches"),
        (["a.tar", "./a.tar"], "listed twice"),
        (["a.tar", "*.tar"], "listed twice"),
        (["empty.bin"], "empty .0 bytes"),
        (["folder"], r"folder/\*\.tar"),
        (["{a.tar"], "unbalanced braces"),
        (["pipe:cat a.tar"], "'pipe:cat a.tar'.*shell.*name a file"),
        (["PIPE:cat a.tar"], "shell"),
        (["{pipe:cat a,b}.tar"], "'pipe:cat a.tar'.*shell"),
        (["ais://bucket/a.tar"], "shell"),
        (["-"], "shell"),
        (["a.tar::b.tar"], "write them as a list"),
        (["nosuchscheme://a.tar"], "cannot be opened"),
    ],
)
def test_what_cannot_be_a_list_of_shards_is_refused(tmp_path: Path, patterns: list[str], error: str) -> None:
    make(tmp_path, "a.tar", "folder/b.tar")
    (tmp_path / "empty.bin").touch()
    with pytest.raises(SourceError, match=error):
        expand_shards(patterns, tmp_path)


def test_one_source_does_not_mix_file_systems(tmp_path: Path) -> None:
    make(tmp_path, "a.tar")
    fsspec.filesystem("memory").pipe_file("/shards-test/m.tar", b"1")
    with pytest.raises(SourceError, match="mixes local files and memory"):
        expand_shards(["a.tar", "memory://shards-test/m.tar"], tmp_path)
