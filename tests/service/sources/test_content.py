"""A stream knows its data again: other content under the same names and sizes is another stream, a copy is the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import SourceError
from packhorse_service.loading.block import BlockRequest
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.sources import content
from packhorse_service.sources.content import PIECE_BYTES, same_content, with_content
from packhorse_service.sources.shards import Shard, expand_shards
from tests.service.corpus import make_plan
from tests.service.shards_on_disk import ids_member, write_tar

SIZE = 8 * PIECE_BYTES


def described(folder: Path, pattern: str = "*.tar") -> tuple[Shard, ...]:
    return with_content(expand_shards([pattern], folder))


def digests(folder: Path) -> list[bytes]:
    return [shard.digest for shard in described(folder)]


def write_shards(folder: Path, count: int = 3) -> list[Path]:
    """Shards of one size."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"part-{number}.tar" for number in range(count)]
    for number, path in enumerate(paths):
        write_tar(path, [(f"{sample}.npy", ids_member(range(number, number + 40))) for sample in range(8)])
    return paths


def swap(paths: list[Path]) -> None:
    first, second, *_ = paths
    first.rename(first.with_name("kept"))
    second.rename(first)
    first.with_name("kept").rename(second)


def append(paths: list[Path]) -> None:
    """``tar --append``: what is added may fit into the padding."""
    extra = paths[0].with_name("more.npy")
    extra.write_bytes(ids_member([7] * 30))
    subprocess.run(["tar", "-C", str(extra.parent), "-rf", str(paths[-1]), extra.name], check=True)


def rewrite(paths: list[Path]) -> None:
    write_tar(paths[1], [(f"{sample}.npy", ids_member(range(100, 140))) for sample in range(8)])


@pytest.mark.parametrize("change", [swap, append, rewrite])
def test_what_keeps_names_and_sizes_and_changes_what_is_in_them_is_another_stream(
    tmp_path: Path, change: Callable[[list[Path]], None]
) -> None:
    paths = write_shards(tmp_path / "a")
    sources = {"a": {"shards": "a/*.tar"}}
    before, sizes = make_plan(tmp_path, sources).fingerprint, [path.stat().st_size for path in paths]
    change(paths)
    assert [path.stat().st_size for path in paths] == sizes
    after = make_plan(tmp_path, sources).fingerprint
    assert after.digest != before.digest
    assert list(after.differing(before.encoded_parts())) == ["manifest"]


def test_a_copy_written_later_elsewhere_is_the_same_stream(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "here" / "a")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    for path in paths:
        os.utime(path, ns=(1, 1))
    here, there = (make_plan(tmp_path / at, {"a": {"shards": "a/*.tar"}}).fingerprint for at in ("here", "there"))
    assert here.digest == there.digest


@given(at=st.integers(0, SIZE - 1))
def test_any_byte_of_a_small_source_counts(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = tmp_path_factory.getbasetemp() / "small.tar"
    path.write_bytes(bytes(SIZE))
    before = digests_of(path)
    path.write_bytes(bytes(at) + b"x" + bytes(SIZE - at - 1))
    assert digests_of(path) != before


def digests_of(path: Path) -> list[bytes]:
    return [shard.digest for shard in described(path.parent, path.name)]


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, SIZE // 2, SIZE - PIECE_BYTES, SIZE - 1])
def test_of_a_large_source_the_beginning_middle_and_end_of_each_shard_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(content, "WHOLE_BYTES", SIZE - 1)
    path = tmp_path / "large.tar"
    path.write_bytes(bytes(SIZE))
    before = digests_of(path)
    path.write_bytes(bytes(at) + b"x" + bytes(SIZE - at - 1))
    assert digests_of(path) != before


def test_of_very_many_large_shards_one_piece_is_read_where_samples_are_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "WHOLE_BYTES", 0)
    monkeypatch.setattr(content, "MANY_SHARDS", 3)
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(bytes(SIZE - 1) + bytes([number]))
    shards = described(tmp_path)
    assert [shard.compared for shard in shards] == [((SIZE - PIECE_BYTES, SIZE),)] * 3
    assert len({shard.digest for shard in shards}) == 3


def test_what_lies_in_a_store_is_not_read_at_the_start() -> None:
    with fsspec.open("memory://content/a.tar", "wb") as stream:
        stream.write(b"anything")
    (shard,) = with_content(expand_shards(["memory://content/a.tar"], Path("/")))
    assert (shard.digest, shard.compared) == (b"", ())


def test_one_content_under_several_names_is_told(tmp_path: Path) -> None:
    first, second, _ = write_shards(tmp_path)
    assert list(same_content({"a": described(tmp_path)})) == []
    shutil.copy(first, tmp_path / "copy.tar")
    (tmp_path / "link.tar").symlink_to(second)
    in_one = list(same_content({"a": described(tmp_path)}))
    assert len(in_one) == 2
    assert "'copy.tar' of source 'a'" in in_one[0]
    assert "'part-0.tar' of source 'a'" in in_one[0]
    (in_two,) = same_content({"a": described(tmp_path, "copy.tar"), "b": described(tmp_path, "part-0.tar")})
    assert "of source 'b'" in in_two


# While the stream runs -----------------------------------------------------------------------------------


def load(loader: BlockLoader, shard: Shard) -> int:
    return loader.load(BlockRequest("a", shard, 0, 0)).count


def test_a_shard_that_is_written_to_while_the_stream_runs_is_refused_and_one_that_is_touched_is_not(
    tmp_path: Path,
) -> None:
    paths = write_shards(tmp_path)
    shards = described(tmp_path)
    loader = BlockLoader({"a": DecodingSpec(name="a")})
    os.utime(paths[1], ns=(5, 5))
    assert [load(loader, shard) for shard in shards] == [8, 8, 8]
    rewrite(paths)
    assert load(loader, shards[0]) == 8
    with pytest.raises(SourceError, match=r"'part-1\.tar'.* was written to since this server started"):
        load(loader, shards[1])


def test_a_shard_that_grows_while_the_stream_runs_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    shards = described(tmp_path)
    with paths[2].open("ab") as stream:
        stream.write(bytes(10240))
    with pytest.raises(SourceError, match=r"'part-2\.tar'.* was written to"):
        load(BlockLoader({"a": DecodingSpec(name="a")}), shards[2])
