"""A block that is loaded as columns is the block that is loaded sample by sample, and so are its errors."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset import TarWriter

from packhorse.errors import SourceError
from packhorse_service.loading import decode
from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.sources import npy
from packhorse_service.sources.tar.columnar import AHEAD_BYTES, Column, ColumnarSamples, ReusableBuffer, read_columnar
from packhorse_service.sources.tar.grouping import group_samples
from packhorse_service.sources.tar.reader import TarMember, read_members
from packhorse_service.sources.tar.scan import scan_members
from tests.service.shards_on_disk import ids_member, load_block, shard_at, write_tar
from tests.shared_data import shared

TarFormat = Literal[0, 1, 2]
FORMATS: dict[str, TarFormat] = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
WHOLE = 1 << 20  # bytes of a block that holds a whole shard of these tests

Outcome = tuple[object, ...] | str


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, mtime: float = 0, comment: str = "") -> bytes:
    """One member as PAX writes it."""
    return written([(name, data)], tarfile.PAX_FORMAT, kind=kind, mtime=mtime, comment=comment)


def written(
    files: Sequence[tuple[str, bytes]],
    tar_format: TarFormat,
    *,
    kind: bytes = tarfile.REGTYPE,
    mtime: float = 0,
    comment: str = "",
) -> bytes:
    """Members without the zeros that end an archive."""
    stream = io.BytesIO()
    for name, data in files:
        header = tarfile.TarInfo(name)
        header.type, header.mtime, header.linkname = kind, mtime, "" if kind in tarfile.REGULAR_TYPES else "a.npy"
        header.size = len(data)
        header.pax_headers = {"comment": comment} if comment else {}
        stream.write(header.tobuf(tar_format))
        stream.write(data + bytes(-len(data) % tarfile.BLOCKSIZE))
    return stream.getvalue()


def loader_of(block_bytes: int) -> BlockLoader:
    return BlockLoader({"s": DecodingSpec(name="s", vocab_size=1000, block_bytes=block_bytes)})


def outcome(loader: BlockLoader, request: BlockRequest) -> tuple[Outcome, int | None]:
    """All that loading gives, as values that compare, and where the next block begins."""
    try:
        block = loader.load(request)
    except SourceError as error:
        return str(error), None
    return contents(block), block.next_offset


def contents(block: TokenBlock) -> tuple[object, ...]:
    arrays = (block.tokens, block.offsets, block.loss_mask, block.labels)
    listed = [None if array is None else (array.dtype, array.tolist()) for array in arrays]
    return (*listed, block.keys, block.next_offset, block.faults, block.checksum)


def outcomes(path: Path, block_bytes: int) -> Iterator[tuple[Outcome, Outcome]]:
    """Of each block of a shard: loaded as it is, and sample by sample."""
    loader, shard, offset = loader_of(block_bytes), shard_at(path), 0
    while True:
        request = BlockRequest("s", shard, offset, 0)
        found, behind = outcome(loader, request)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "read_columnar", lambda *_: None)
            yield found, outcome(loader, request)[0]
        if behind is None:
            return
        assert behind > offset
        offset = behind


def assert_same(path: Path, raw: bytes, block_bytes: int = WHOLE) -> None:
    path.write_bytes(raw)
    for found, by_sample in outcomes(path, block_bytes):
        assert found == by_sample


def uniform_of(raw: bytes, block_bytes: int = WHOLE, offset: int = 0) -> ColumnarSamples | None:
    return read_columnar(io.BytesIO(raw), offset, block_bytes, ReusableBuffer())


def ids_of(count: int, dtype: str = "<i4") -> bytes:
    return ids_member([(7 * number) % 100 for number in range(count)], dtype)


def test_a_block_stays_as_it_is_when_the_next_is_read_into_the_same_memory(tmp_path: Path) -> None:
    loader = loader_of(block_bytes=1)
    requests = []
    for number, dtype in enumerate(("<u4", "<i4", "<u2")):
        path = tmp_path / f"{number}.tar"
        mask = ids_member([number % 2] * 20, "|u1")
        write_tar(path, [("0.npy", ids_member([number + 1] * 20, dtype)), ("0.loss_mask.npy", mask)])
        requests.append(BlockRequest("s", shard_at(path), 0, 0))
    kept = [loader.load(request) for request in requests]
    assert list(map(contents, kept)) == [contents(loader_of(1).load(request)) for request in requests]


# Archives -----------------------------------------------------------------------------------------------

keys = st.text(st.sampled_from("ab/.é_"), min_size=1, max_size=6) | st.integers(0, 50).map(str)
extensions = st.sampled_from(
    [("npy",)] * 6
    + [("tokens.npy",), ("labels.npy", "npy"), ("loss_mask.npy", "npy"), ("NPY",), ("npy.gz",), ("json", "npy"), ("",)]
)
datas = st.builds(ids_of, st.integers(0, 400), st.sampled_from(["<i4"] * 6 + [">i4", "<u2", "<i8", "|u1", "<f4"]))
odd_members = st.sampled_from(
    [
        member("README", b"about"),
        member("__index__", b"1"),
        member("folder/", kind=tarfile.DIRTYPE),
        member("link.npy", kind=tarfile.SYMTYPE),
        member("hard.npy", kind=tarfile.LNKTYPE),
        member("long" * 40 + ".npy", ids_of(3)),
        member("é.npy", ids_of(3)),
        member("told.npy", ids_of(3), comment="a record that says nothing of path or size"),
        written([("gnu" * 40 + ".npy", ids_of(3))], tarfile.GNU_FORMAT),
        written([("sparse.npy", b"")], tarfile.GNU_FORMAT, kind=tarfile.GNUTYPE_SPARSE),
        written([("contiguous.npy", ids_of(3))], tarfile.USTAR_FORMAT, kind=tarfile.CONTTYPE),
        member("told.npy", comment="a header that nothing follows, or another one")[:1024],
        bytes(512),
    ]
)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Shards of ids: mostly alike throughout, as real ones, with odd members in some."""
    tar_format = draw(st.sampled_from(list(FORMATS.values())))
    mtime = draw(st.sampled_from([0, 1_700_000_000.25]))
    ends = draw(st.lists(extensions, min_size=1, max_size=2))
    parts: list[bytes] = []
    for number, key in enumerate(draw(st.lists(keys, min_size=1, max_size=12, unique=draw(st.booleans())))):
        data = draw(datas)
        for end in ends[number % len(ends)]:
            parts.append(written([(f"{key}.{end}", data)], tar_format, mtime=mtime))
    for odd in draw(st.lists(odd_members, max_size=2)):
        parts.insert(draw(st.integers(0, len(parts))), odd)
    return b"".join(parts) + draw(st.sampled_from([bytes(1024), b"", bytes(100), b"garbage!" * 64]))


@settings(max_examples=400)
@given(raw=archives(), block_bytes=st.sampled_from([1, 2000, 5000, WHOLE]))
def test_any_archive_loads_as_it_does_sample_by_sample(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, block_bytes: int
) -> None:
    assert_same(tmp_path_factory.getbasetemp() / "any.tar", raw, block_bytes)


@settings(max_examples=200)
@given(raw=archives())
def test_a_run_of_plain_members_is_how_the_shard_begins(raw: bytes) -> None:
    run = scan_members(raw, at_end=True)
    found: list[TarMember] = []
    try:
        found.extend(read_members(io.BytesIO(raw), shard="x.tar"))
    except SourceError:
        assert not run.ended
    told = [m for m in found if not m.name.startswith("__")]
    kept = [
        (name.decode(), start, raw[begin : begin + size])
        for name, start, begin, size in zip(
            run.names, run.firsts.tolist(), run.starts.tolist(), run.sizes.tolist(), strict=True
        )
        if not name.startswith(b"__")
    ]
    assert kept == [(m.name, m.offset, m.data) for m in told[: len(kept)]]
    assert not run.ended or len(kept) == len(told)


# What is loaded as columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mtime", [0, 1_700_000_000.123456], ids=["whole times", "times in PAX headers"])
@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    "names",
    [
        ("{}.npy",),
        ("./{}.npy",),
        ("v1.0/en/{}.npy",),
        ("é/{}.tokens.npy",),
        ("{}.labels.npy", "{}.loss_mask.npy", "{}.npy"),
    ],
)
def test_shards_of_samples_that_are_alike_are_columns_from_every_block(
    tmp_path: Path, names: tuple[str, ...], tar_format: TarFormat, mtime: float
) -> None:
    files = [(name.format(number), ids_member([1] * (number + 2), "<i4")) for number in range(40) for name in names]
    raw = written(files, tar_format, mtime=mtime) + bytes(1024)
    assert_same(tmp_path / "x.tar", raw, 10_000)
    if "é" in names[0] and tar_format == tarfile.PAX_FORMAT:
        assert uniform_of(raw) is None  # PAX writes such names into headers of their own
        return
    offset: int | None = 0
    while offset is not None:
        uniform = uniform_of(raw, 10_000, offset)
        assert uniform is not None
        offset = uniform.next_offset


def test_what_webdataset_writes_is_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with TarWriter(str(path)) as writer:
        for number in range(30):
            writer.write({"__key__": f"{number:06d}", "npy": ids_of(number + 2)})
    uniform = uniform_of(path.read_bytes())
    assert uniform is not None
    assert uniform.keys == [f"{number:06d}" for number in range(30)]
    assert_same(path, path.read_bytes(), 3000)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i4", "<u8", ">i8", "|u1", "|i1"])
def test_ids_of_any_dtype_and_byte_order_are_the_same(tmp_path: Path, dtype: str) -> None:
    raw = written([(f"{number}.npy", ids_of(number + 2, dtype)) for number in range(20)], tarfile.USTAR_FORMAT)
    assert uniform_of(raw) is not None
    assert_same(tmp_path / "x.tar", raw)


def test_ids_of_two_byte_orders_are_not_mixed_up(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(written([("a.npy", ids_of(3, "<i4")), ("b.npy", ids_of(3, ">i4"))], tarfile.USTAR_FORMAT))
    assert load_block(path).tokens.tolist() == [0, 7, 14] * 2


@pytest.mark.parametrize("name", ["mpdata", "tendata"])
def test_real_shards_whose_samples_are_alike_are_columns_of_what_is_in_them(name: str) -> None:
    raw = shared(f"data/wds/{name}.tar").read_bytes()
    samples = list(group_samples(read_members(io.BytesIO(raw), shard=name), shard=name))
    uniform = uniform_of(raw, len(raw))
    assert uniform is not None
    [(extension, column)] = uniform.columns.items()
    places = zip(column.starts.tolist(), column.sizes.tolist(), strict=True)
    data = [column.buffer[start : start + size] for start, size in places]
    assert uniform.keys == [sample.key for sample in samples]
    assert data == [sample.members[extension].data for sample in samples]


@pytest.mark.parametrize("name", ["mpdata", "tendata"])
def test_real_shards_load_as_they_do_sample_by_sample(tmp_path: Path, name: str) -> None:
    assert_same(tmp_path / "x.tar", shared(f"data/wds/{name}.tar").read_bytes(), 100_000)


@pytest.mark.parametrize("name", ["compressed", "testgz"])
def test_real_shards_of_compressed_texts_are_no_columns(name: str) -> None:
    assert uniform_of(shared(f"data/wds/{name}.tar").read_bytes()) is None


# What is damaged -----------------------------------------------------------------------------------------


def small(tar_format: TarFormat, mtime: float) -> bytes:
    return written([("a.npy", ids_of(5)), ("b.npy", ids_of(3))], tar_format, mtime=mtime)


@pytest.mark.parametrize(("tar_format", "mtime"), [(tarfile.GNU_FORMAT, 0), (tarfile.PAX_FORMAT, 1.5)])
def test_a_shard_cut_at_any_byte_loads_as_it_does_sample_by_sample(
    tmp_path: Path, tar_format: TarFormat, mtime: float
) -> None:
    raw = small(tar_format, mtime)
    for length in range(1, len(raw), 1 if mtime == 0 else 3):
        assert_same(tmp_path / "x.tar", raw[:length])


@pytest.mark.parametrize("mended", [False, True], ids=["checksum wrong", "checksum right"])
def test_a_header_changed_at_any_byte_loads_as_it_does_sample_by_sample(tmp_path: Path, mended: bool) -> None:
    raw = small(tarfile.PAX_FORMAT, 1.5)
    second = len(raw) // 2
    for header in (second, second + 1024):
        for at in range(header, header + 640):  # the data's first bytes as well
            changed = bytearray(raw)
            changed[at] = b"\0 17-\n\xff/."[at % 9]
            if mended and not 148 <= at - header < 156:
                counted = sum(changed[header : header + 512]) - sum(changed[header + 148 : header + 156])
                changed[header + 148 : header + 156] = b"%06o\0 " % (counted + 8 * ord(" "))
            assert_same(tmp_path / "x.tar", bytes(changed))


@pytest.mark.parametrize("digits", [b"12", b"14", b"0=", b"\xb13", b" 3", b"+3", b"1\0"])
def test_a_pax_header_that_tells_a_wrong_length_is_refused(tmp_path: Path, digits: bytes) -> None:
    raw = small(tarfile.PAX_FORMAT, 1.5)
    assert raw.count(b"13 mtime=1.5\n") == 2
    changed = raw.replace(b"13 mtime", digits + b" mtime", 1)
    assert_same(tmp_path / "x.tar", changed)
    with pytest.raises(SourceError, match="the PAX header before this byte is malformed"):
        loader_of(WHOLE).load(BlockRequest("s", shard_at(tmp_path / "x.tar"), 0, 0))


def test_two_pax_headers_in_a_row_belong_to_one_member(tmp_path: Path) -> None:
    first, second = member("a.npy", ids_of(3), mtime=1.5), member("b.npy", ids_of(3), mtime=1.5)
    assert_same(tmp_path / "x.tar", first + second[:1024] + second, 1)
    assert scan_members(first + second[:1024] + second, at_end=True).names == [b"a.npy"]


def test_a_pax_header_that_nothing_follows_is_an_error(tmp_path: Path) -> None:
    first, second = member("a.npy", ids_of(3), mtime=1.5), member("b.npy", ids_of(3), mtime=1.5)
    for end in (b"", bytes(1024)):
        assert_same(tmp_path / "x.tar", first + second[:1024] + end)
        with pytest.raises(SourceError, match="ends after an extension header"):
            loader_of(WHOLE).load(BlockRequest("s", shard_at(tmp_path / "x.tar"), 0, 0))


def test_a_sample_that_ends_with_what_was_read_is_not_taken_for_the_last(tmp_path: Path) -> None:
    block_bytes = 1024
    data = ids_of((block_bytes + AHEAD_BYTES - 512 - 128) // 4)
    raw = written([("a.npy", data), ("b.npy", ids_of(5))], tarfile.USTAR_FORMAT)
    assert len(member("a.npy", data)) == block_bytes + AHEAD_BYTES
    assert_same(tmp_path / "x.tar", raw, block_bytes)
    assert loader_of(block_bytes).load(BlockRequest("s", shard_at(tmp_path / "x.tar"), 0, 0)).next_offset is not None


def test_data_that_looks_like_a_header_is_data(tmp_path: Path) -> None:
    inner = written([("inner.npy", ids_of(5))], tarfile.USTAR_FORMAT)
    padded = np.frombuffer(bytes(384) + inner + inner, "<u2") % 1000
    files = [("a.npy", ids_of(5)), ("b.npy", ids_member(padded.tolist(), "<u2")), ("c.npy", ids_of(5))]
    raw = written(files, tarfile.USTAR_FORMAT)
    nested = written([("a.npy", ids_of(5)), ("b.npy", inner), ("c.npy", ids_of(5))], tarfile.USTAR_FORMAT)
    assert nested.count(b"ustar") == 4
    for archive in (raw, nested):
        assert_same(tmp_path / "x.tar", archive)
        assert scan_members(nested, at_end=True).names == [b"a.npy", b"b.npy"]


def test_a_header_of_an_array_that_claims_what_would_overflow_is_a_fault(tmp_path: Path) -> None:
    whole = ids_of(0, "<i8")
    for count in (1 << 61, 1 << 63, 1 << 64, 10**30):
        said = whole.replace(b"(0,)", b"(%d,)" % count)
        said = said.replace(b" " * (len(said) - len(whole)), b"", 1)
        assert len(said) == len(whole)
        assert_same(tmp_path / "x.tar", written([("a.npy", ids_of(5)), ("b.npy", said)], tarfile.USTAR_FORMAT))


@pytest.mark.parametrize(
    "names",
    [
        ("a.npy", "a.npy"),  # a key that comes twice, next to itself
        ("a.npy", "b.npy", "a.npy"),
        ("a.npy", "b.npy", "b.loss_mask.npy"),
        ("./a.npy", "./.npy", "./b.npy"),
        ("a\n./x.npy", "a\n./y.npy"),
        ("__meta__/a.npy", "b.npy"),
        ("__open.npy", "b.npy"),
        ("a.npy", "b.c.npy"),
        ("a.npy", ".npy"),
        ("a.npy", "d/b.npy"),
        ("b.npy", "__meta__/a.npy"),
        ("b.npy", "a.npy", "a.npy"),
        ("a.labels.npy", "a.npy", "b.labels.npy", "c.npy"),
        ("a.labels.npy", "a.npy", "b.labels.npy"),
        ("a.NPY", "b.NPY"),
        ("a.npy.gz", "b.npy.gz"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1025, WHOLE])
def test_odd_names_load_as_they_do_sample_by_sample(tmp_path: Path, names: tuple[str, ...], block_bytes: int) -> None:
    raw = written([(name, ids_of(5)) for name in names], tarfile.GNU_FORMAT) + bytes(1024)
    assert_same(tmp_path / "x.tar", raw, block_bytes)


@pytest.mark.parametrize(
    "arrays",
    [
        {"npy": ids_of(4, "<u2")},  # beside 32-bit ones
        {"npy": ids_of(4, ">i4")},
        {"npy": ids_of(4, "|b1")},
        {"npy": ids_of(5)[:-1]},
        {"npy": ids_of(5) + b"\0"},
        {"npy": ids_of(5)[:-4]},
        {"npy": ids_of(5) + bytes(4)},
        {"npy": ids_of(5, "<f4")},
        {"npy": ids_of(1)},
        {"npy": ids_of(0)},
        {"npy": ids_member([1, 1000])},
        {"npy": ids_member([1, -1])},
        {"npy": b""},
        {"npy": ids_of(5), "tokens.npy": ids_of(5)},
        {"npy": ids_of(5), "json": b"{}"},
        {"npy": ids_of(5), "cls": b"7"},
        {"loss_mask.npy": ids_of(5, "|u1"), "npy": ids_of(5)},
        {"loss_mask.npy": ids_member([1] * 4), "npy": ids_of(5)},
        {"loss_mask.npy": ids_member([1] * 5, "<f4"), "npy": ids_of(5)},
        {"labels.npy": ids_member([5, 1000]), "npy": ids_of(2)},
        {"labels.npy": ids_member([5, -100, -7]), "npy": ids_of(3)},
        {"labels.npy": ids_member([5, 6], "<f4"), "npy": ids_of(2)},
        {"labels.npy": ids_of(1), "npy": ids_of(1)},
        {"labels.npy": ids_of(5)},
    ],
    ids=lambda arrays: " ".join(arrays),
)
@pytest.mark.parametrize("alike", [False, True], ids=["one sample", "all samples"])
def test_arrays_that_are_no_good_ids_load_as_they_do_sample_by_sample(
    tmp_path: Path, arrays: dict[str, bytes], alike: bool
) -> None:
    good = {extension: ids_member([1] * 4) for extension in arrays}
    samples = {"a": arrays if alike else good, "b": arrays, "c": arrays if alike else good}
    files = [(f"{key}.{extension}", data) for key, sample in samples.items() for extension, data in sample.items()]
    assert_same(tmp_path / "x.tar", written(files, tarfile.USTAR_FORMAT))


@settings(max_examples=100)
@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=4))
def test_names_of_any_bytes_give_the_same_keys(tmp_path_factory: pytest.TempPathFactory, names: list[bytes]) -> None:
    parts = []
    for name in names:
        header = bytearray(written([("x.npy", b"")], tarfile.USTAR_FORMAT))
        header[: len(name) + 4] = name + b".npy"
        header[124:135] = b"%011o" % len(ids_of(3))
        counted = sum(header) - sum(header[148:156])
        header[148:156] = b"%06o\0 " % (counted + 8 * ord(" "))
        parts.append(bytes(header) + ids_of(3).ljust(512, b"\0"))
    assert_same(tmp_path_factory.getbasetemp() / "names.tar", b"".join(parts))


def test_a_sample_that_reaches_far_behind_its_block_is_read_whole(tmp_path: Path) -> None:
    raw = written([(f"{number}.npy", ids_of(60_000)) for number in range(4)], tarfile.USTAR_FORMAT)
    assert_same(tmp_path / "x.tar", raw, 1000)


def test_headers_of_more_counts_than_are_kept_are_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "HEADERS_KEPT", 8)
    arrays = [np.arange(count, dtype=np.int16) for count in (*range(50, 80), *range(50, 80))]
    files = [npy.dump_array(array) for array in arrays]
    buffer = b"".join(data + bytes(-len(data) % tarfile.BLOCKSIZE) for data in files)
    sizes = np.array(list(map(len, files)))
    starts = np.cumsum([0, *(-(-sizes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)[:-1]])
    joined = npy.join_arrays(Column(memoryview(buffer), starts, sizes))
    assert joined is not None
    assert joined.counts.tolist() == list(map(len, arrays))
    assert np.array_equal(joined.values, np.concatenate(arrays))
    assert 0 < len(npy.headers_of("<i2", 128)) <= 8
