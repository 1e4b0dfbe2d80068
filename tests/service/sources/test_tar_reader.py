"""The tar reader agrees with ``tarfile`` and ``webdataset``, from every offset, and names what is damaged."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import SourceError
from packhorse_service.sources.tar.reader import TarMember, read_members
from tests.service.shards_on_disk import write_tar
from tests.shared_data import shared

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
WDS = ["compressed.tar", "mpdata.tar", "tendata.tar", "testgz.tar"]


def read(raw: bytes, offset: int = 0) -> list[TarMember]:
    return list(read_members(io.BytesIO(raw), offset, shard="x.tar"))


def tarfile_reads(raw: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        contents = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
        return [(name, content.read()) for name, content in contents if content is not None]


def tar_of(files: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tar_format) as tar:
        for name, data in files:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def assert_same_from_every_offset(raw: bytes) -> None:
    members = read(raw)
    assert [(member.name, member.data) for member in members] == tarfile_reads(raw)
    for index, member in enumerate(members):
        assert next(read_members(io.BytesIO(raw), member.offset, shard="x.tar")) == member
        assert next(read_members(io.BytesIO(raw), member.next_offset, shard="x.tar"), None) == next(
            iter(members[index + 1 :]), None
        )


@pytest.mark.parametrize("name", WDS)
def test_real_shards_read_as_tarfile_reads_them_from_every_member(name: str) -> None:
    assert_same_from_every_offset(shared(f"data/wds/{name}").read_bytes())


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
def test_long_deep_and_unicode_names_read_as_tarfile_reads_them(tar_format: int) -> None:
    deep = "/".join(["folder"] * 20) + "/name.txt"
    names = ["a.txt", deep, "日本/ключ.txt", "x" * 98 + ".t", "y" * 95 + ".json"]
    if tar_format != tarfile.USTAR_FORMAT:
        names.append("long" * 100 + ".txt")
    assert_same_from_every_offset(tar_of([(name, name.encode() * 30) for name in names], tar_format))


members = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.binary(max_size=1500)),
    max_size=6,
)


@given(members)
def test_any_names_and_sizes_come_back_from_every_member(files: list[tuple[str, bytes]]) -> None:
    # tarfile strips a trailing slash, and what starts with `__name__` is webdataset's, not data.
    files = [(f"k{name.strip('/')}", data) for name, data in files]
    assert_same_from_every_offset(tar_of(files))
    assert [(member.name, member.data) for member in read(tar_of(files, tarfile.GNU_FORMAT))] == files


def with_header(kind: bytes) -> bytes:
    """A tar of a file, a header of this kind and another file."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
        header = tarfile.TarInfo("odd.txt")
        header.type, header.linkname = kind, "a.txt"
        tar.addfile(header)
        tar.addfile(tarfile.TarInfo("b.txt"))
    return stream.getvalue()


def test_folders_are_skipped_as_webdataset_skips_them() -> None:
    assert [member.name for member in read(with_header(tarfile.DIRTYPE))] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.FIFOTYPE, "a FIFO"),
        (tarfile.CHRTYPE, "a character device"),
        (tarfile.BLKTYPE, "a block device"),
    ],
)
def test_what_has_no_content_of_its_own_is_refused_with_the_way_out(kind: bytes, named: str) -> None:
    with pytest.raises(SourceError, match=rf"member 'odd\.txt' at byte 512: it is {named}.*--hard-dereference"):
        read(with_header(kind))


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(tar_of([("b.txt", b"more")]), id="another archive"),
        pytest.param(b"garbage", id="garbage"),
        pytest.param(bytes(300_000) + b"x", id="far behind"),
    ],
)
@pytest.mark.parametrize("compress", [bytes, partial(gzip.compress, mtime=0)], ids=["plain", "gzip"])
def test_data_behind_the_end_of_the_archive_is_refused(behind: bytes, compress: Callable[[bytes], bytes]) -> None:
    raw = tar_of([("a.txt", b"1")])
    at = len(raw) + len(behind) - len(behind.lstrip(bytes(1)))
    with pytest.raises(SourceError, match=rf"at byte {at}: there is data behind the end"):
        read(compress(raw + behind))
    assert [member.name for member in read(compress(raw + bytes(300_000)))] == ["a.txt"]


def test_webdatasets_metadata_members_are_skipped() -> None:
    raw = tar_of([("__index__", b"1"), ("__meta__/a.txt", b"2"), ("a/__b__.txt", b"3"), ("__open.txt", b"4")])
    assert [member.name for member in read(raw)] == ["a/__b__.txt", "__open.txt"]


def test_tars_from_before_posix_are_read_and_their_folders_skipped() -> None:
    def old(name: str, data: bytes) -> bytes:
        header = bytearray(512)
        header[: len(name)] = name.encode()
        header[124:136] = b"%11o " % len(data)
        header[148:156] = b" " * 8
        header[148:156] = b"%6o\0 " % sum(header)
        return bytes(header) + data + bytes(-len(data) % 512)

    assert_same_from_every_offset(old("folder/", b"") + old("folder/a.txt", b"old") + bytes(1024))


def test_a_binary_size_is_read_as_gnu_writes_it() -> None:
    raw = bytearray(tar_of([("a.txt", b"123")], tarfile.GNU_FORMAT))
    raw[124:136] = b"\x80" + (3).to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    assert_same_from_every_offset(bytes(raw))


def test_pax_headers_that_are_for_all_members_do_not_hide_the_next_member() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", pax_headers={"comment": "made for a test"}) as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    assert_same_from_every_offset(stream.getvalue())


def test_a_global_header_that_renames_members_is_refused() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", pax_headers={"path": "b.txt"}) as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(SourceError, match=r"x\.tar.*global PAX header"):
        read(stream.getvalue())


@pytest.mark.parametrize(("kind", "what"), [(b"S", "sparse"), (b"V", "volume label"), (b"Z", "type 'Z'")])
def test_kinds_that_are_not_plain_files_are_refused_by_name(kind: bytes, what: str) -> None:
    header = tarfile.TarInfo("odd.txt")
    header.type = kind
    with pytest.raises(SourceError, match=rf"member 'odd\.txt' at byte 0.*{what}"):
        read(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_sparse_files_in_pax_form_are_refused() -> None:
    header = tarfile.TarInfo("odd.txt")
    header.pax_headers = {"GNU.sparse.major": "1"}
    with pytest.raises(SourceError, match="sparse"):
        read(header.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


def test_a_missing_end_mark_is_accepted_at_a_members_end() -> None:
    raw = tar_of([("a.txt", b"1" * 700), ("b.txt", b"2")])
    end = read(raw)[-1].next_offset
    assert read(raw[:end]) == read(raw)


def test_a_cut_shard_is_an_error_wherever_it_is_cut() -> None:
    raw = tar_of([("a.txt", b"1" * 700), ("long" * 60 + ".txt", b"2" * 5)])
    found = read(raw)
    boundaries = {0, *(member.next_offset for member in found)}
    for length in range(7, found[-1].next_offset, 61):
        if length not in boundaries:
            with pytest.raises(SourceError, match=r"shard 'x\.tar'.* at byte \d+: the shard (is cut|ends after)"):
                read(raw[:length])


def test_the_error_for_a_cut_last_member_names_it_and_its_offset() -> None:
    raw = tar_of([("a.txt", b"1"), ("b.txt", b"2" * 600)])
    with pytest.raises(
        SourceError, match=r"shard 'x\.tar', member 'b\.txt' at byte 1024: .*cut inside .*copy it again"
    ):
        read(raw[:2000])


def test_garbage_is_an_error_that_names_the_offset() -> None:
    with pytest.raises(SourceError, match=r"'x\.tar' at byte 0: there is no tar header"):
        read(b"no tar at all " * 100)
    raw = tar_of([("a.txt", b"1")])
    with pytest.raises(SourceError, match=r"'x\.tar' at byte 1024: there is no tar header"):
        read(raw[:1024] + b"garbage!" * 64 + raw[1024:])


def test_an_offset_that_is_no_members_is_an_error() -> None:
    with pytest.raises(SourceError, match="at byte 512: there is no tar header"):
        read(tar_of([("a.txt", b"1")]), 512)
    for offset in (-512, 5):
        with pytest.raises(SourceError, match=f"at byte {offset}: members begin at multiples of 512"):
            read(tar_of([("a.txt", b"1")]), offset)


def test_a_size_beyond_the_end_takes_no_memory_for_it() -> None:
    raw = bytearray(tar_of([("a.txt", b"123")]))
    raw[124:136] = b"\x80" + (1 << 60).to_bytes(11, "big")
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    with pytest.raises(SourceError, match="cut inside"):
        read(bytes(raw))


def test_gzip_shards_count_offsets_in_the_tar_whatever_their_name() -> None:
    raw = tar_of([(f"{number}.txt", b"text" * number) for number in range(20)])
    packed = gzip.compress(raw)
    assert read(packed) == read(raw)
    for member in read(raw):
        assert read(packed, member.offset) == read(raw, member.offset)


def test_a_damaged_gzip_shard_is_an_error_and_not_a_failed_read() -> None:
    packed = gzip.compress(tar_of([("a.txt", b"text" * 1000)]))
    wrong_sum = packed[:-8] + bytes(4) + packed[-4:]
    for damaged in (packed[:-9], packed[: len(packed) // 2], wrong_sum):
        with pytest.raises(SourceError, match="gzip stream is damaged"):
            read(damaged)


@pytest.mark.parametrize(
    ("name", "magic"), [("bzip2", b"BZh91AY&SY"), ("xz", b"\xfd7zXZ\0"), ("zstd", b"\x28\xb5\x2f\xfd\0")]
)
def test_other_compressions_are_refused_by_name(name: str, magic: bytes) -> None:
    with pytest.raises(SourceError, match=f"compressed with {name}.*decompress it"):
        read(magic.ljust(600, b"\1"))


def test_names_that_are_not_utf_8_stay_printable(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [(b"caf\xe9.txt".decode("latin-1"), b"1")])
    raw = path.read_bytes().replace("é".encode(), b"\xe9\0")
    header = bytearray(raw[:512])
    name = b"caf\xe9.txt"
    header[: len(name) + 1] = name + b"\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    [member] = read(bytes(header) + raw[512:])
    assert member.name == "caf\\xe9.txt"


def test_checksums_that_count_signed_bytes_are_accepted() -> None:
    raw = bytearray(tar_of([("é.txt", b"1")], tarfile.GNU_FORMAT))
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(byte - 256 if byte > 127 else byte for byte in raw[:512])
    assert [member.name for member in read(bytes(raw))] == ["é.txt"]
