"""A shard comes out of the loader whole, whatever the blocks, and bad content never shifts its neighbours."""

from __future__ import annotations

import gzip
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from packhorse_service.sources.formats import SampleFormat
from packhorse_service.sources.shards import Shard
from tests.service.shards_on_disk import Files, ids_member, load_all, load_block, shard_at, write_tar
from tests.shared_data import shared

SAMPLES = [("a", [5, 6, 7]), ("b", [8, 9]), ("c", [10, 11, 12, 13]), ("d", [14, 15])]


def id_files() -> list[tuple[str, bytes]]:
    return [(f"{key}.npy", ids_member(ids)) for key, ids in SAMPLES]


def rows_of(block: TokenBlock) -> list[list[int]]:
    return [block.tokens[start:end].tolist() for start, end in zip(block.offsets, block.offsets[1:], strict=False)]


def the_fault(tmp_path: Path, files: Files, **settings: object) -> str:
    """Load ``files`` between two good samples and return the text of the one fault, which must not touch them."""
    good = ("0.npy", ids_member([1, 2])), ("9.npy", ids_member([3, 4]))
    path = write_tar(tmp_path / "x.tar", [good[0], *files, good[1]], tarfile.PAX_FORMAT)
    block = load_block(path, **{"vocab_size": 100} | settings)
    [fault] = block.faults
    assert fault.index == 1
    assert rows_of(block) == [[1, 2], [], [3, 4]]
    return str(fault)


def test_a_block_holds_ids_keys_and_offsets_of_its_samples(tmp_path: Path) -> None:
    block = load_block(write_tar(tmp_path / "x.tar", id_files()), vocab_size=16)
    assert rows_of(block) == [ids for _, ids in SAMPLES]
    assert block.keys == ("a", "b", "c", "d")
    assert (block.loss_mask, block.labels, block.next_offset, block.faults) == (None, None, None, ())
    assert [block.tokens.dtype, block.offsets.dtype] == [np.dtype(np.uint32), np.dtype(np.int64)]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=12),
    block_bytes=st.integers(1, 9000),
    masked=st.booleans(),
    packed=st.booleans(),
)
def test_blocks_of_any_size_join_to_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block_bytes: int, masked: bool, packed: bool
) -> None:
    files = []
    for number, size in enumerate(sizes):
        if masked:
            files.append((f"{number}.loss_mask.npy", ids_member([1] * (size + 1), "|u1")))
        files.append((f"{number}.npy", ids_member(range(size + 1))))
    path = write_tar(tmp_path_factory.mktemp("blocks") / "x.tar", files)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    loader = BlockLoader({"s": DecodingSpec(name="s", vocab_size=1000, block_bytes=block_bytes)})
    blocks = load_all(loader, "s", shard_at(path))
    assert [row for block in blocks for row in rows_of(block)] == [list(range(size + 1)) for size in sizes]
    assert [key for block in blocks for key in block.keys] == [str(number) for number in range(len(sizes))]
    assert all(block.count >= 1 for block in blocks)
    assert all((block.loss_mask is not None) == masked for block in blocks)


def test_a_block_ends_with_the_sample_that_reaches_its_size(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [(f"{number}.npy", ids_member([1, 2])) for number in range(6)])
    for block_bytes, counts in ((1, [1] * 6), (1024, [1] * 6), (1025, [2, 2, 2]), (5000, [5, 1]), (10**6, [6])):
        loader = BlockLoader({"s": DecodingSpec(name="s", vocab_size=9, block_bytes=block_bytes)})
        assert [block.count for block in load_all(loader, "s", shard_at(path))] == counts


def test_trailing_members_that_are_no_samples_do_not_make_a_block(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.npy", ids_member([1, 2])), ("README", b"x"), ("__end__", b"x")])
    assert load_block(path, block_bytes=1).next_offset is None


def test_masks_and_labels_travel_with_their_ids(tmp_path: Path) -> None:
    files = [
        ("a.labels.npy", ids_member([6, -100, 8], "<i8")),
        ("a.loss_mask.npy", ids_member([0, 1, 1], "|u1")),
        ("a.npy", ids_member([5, 6, 7])),
        ("b.labels.npy", ids_member([9])),
        ("b.npy", ids_member([8])),
    ]
    block = load_block(write_tar(tmp_path / "x.tar", files), vocab_size=10)
    assert rows_of(block) == [[5, 6, 7], [8]]
    assert block.labels is not None
    assert block.loss_mask is not None
    assert block.labels.tolist() == [6, 0, 8, 9]
    assert block.loss_mask.tolist() == [0, 0, 1, 1]


def test_samples_without_a_mask_are_trained_on_everywhere_beside_masked_ones(tmp_path: Path) -> None:
    files = [*id_files()[:1], ("m.loss_mask.npy", ids_member([0, 1], "|u1")), ("m.npy", ids_member([1, 2]))]
    block = load_block(write_tar(tmp_path / "x.tar", files), vocab_size=16)
    assert block.loss_mask is not None
    assert block.loss_mask.tolist() == [1, 1, 1, 0, 1]


def test_mixed_dtypes_in_one_block_keep_their_values(tmp_path: Path) -> None:
    big = 2**32 - 2
    files = [
        ("a.npy", ids_member([1, big], ">u8")),
        ("b.npy", ids_member([2, 3], "<i8")),
        ("c.npy", ids_member([4, 5], "|u1")),
    ]
    assert rows_of(load_block(write_tar(tmp_path / "x.tar", files))) == [[1, big], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([("x.npy", ids_member([1, 100]))], "id 100 is outside the vocabulary of 100 ids"),
        ([("x.npy", ids_member([1, 2**63 + 5], "<u8"))], "is outside the vocabulary"),
        ([("x.npy", ids_member([1, -1]))], "id -1 is outside the vocabulary"),
        ([("x.npy", ids_member([1]))], "the sample is empty: it has 1 ids and at least 2"),
        ([("x.npy", ids_member([]))], "the sample is empty: it has 0 ids"),
        ([("x.npy", ids_member([1, 2], "<f4"))], "ids must be integers"),
        ([("x.loss_mask.npy", ids_member([0, 2])), ("x.npy", ids_member([1, 2]))], "the loss mask holds 2"),
        ([("x.ten", b"...")], "members are 'x.ten', none of which is read"),
    ],
)
def test_bad_content_is_a_fault_that_names_its_place_and_touches_nothing_else(
    tmp_path: Path, files: Files, error: str
) -> None:
    text = the_fault(tmp_path, files)
    assert text.startswith("shard 'x.tar', member 'x.")
    assert "at byte 1024: " in text
    assert error in text


def test_bad_labels_are_faults_as_ids_are(tmp_path: Path) -> None:
    files = [("a.labels.npy", ids_member([1, 99])), ("a.npy", ids_member([1, 2]))]
    block = load_block(write_tar(tmp_path / "x.tar", files), vocab_size=10)
    assert "label 99 is outside the vocabulary of 10 ids" in str(block.faults[0])


def test_bad_text_and_messages_are_faults(tmp_path: Path, tiny_tokenizer: Path) -> None:
    spec = TokenizerSpec(file=str(tiny_tokenizer))
    cases: list[tuple[str, bytes, str]] = [
        ("x.txt", b"\xff\xfe", "not UTF-8"),
        ("x.txt", b"", "the sample is empty"),
        ("x.json", b"{", "not JSON"),
        ("x.json", b'{"messages": [{"role": "user"}]}', "message 1 (user) has content null"),
    ]
    for name, data, error in cases:
        assert error in the_fault(tmp_path, [(name, data)], tokenizer=spec, vocab_size=None)


def test_text_and_messages_are_tokenised_with_mask_and_end(tmp_path: Path, tiny_tokenizer: Path) -> None:
    spec = TokenizerSpec(file=str(tiny_tokenizer), eos_token="<|endoftext|>")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    files = [("a.txt", "é\n".encode()), ("b.json", json.dumps(messages).encode())]
    block = load_block(write_tar(tmp_path / "x.tar", files), tokenizer=spec)
    raw = Tokenizer(TokenizerSpec(file=str(tiny_tokenizer)))
    text, chat = rows_of(block)
    assert text == [*raw.encode("é\n").tolist(), 0]
    assert chat == raw.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n").tolist()
    assert block.loss_mask is not None
    trained = block.tokens[block.offsets[1] :][block.loss_mask[block.offsets[1] :] == 1]
    assert trained.tolist() == raw.encode("ho<|im_end|>").tolist()
    assert block.loss_mask[: block.offsets[1]].all()


def test_labels_in_only_some_samples_are_an_error(tmp_path: Path) -> None:
    files = [*id_files()[:1], ("l.labels.npy", ids_member([1])), ("l.npy", ids_member([1]))]
    with pytest.raises(
        SourceError, match=r"member 'a\.npy' at byte 0: the sample has no \.labels\.npy and sample 'l' has"
    ):
        load_block(write_tar(tmp_path / "x.tar", files))


def test_a_template_that_cannot_be_marked_is_an_error_with_the_place(tmp_path: Path, tiny_tokenizer: Path) -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_tar(tmp_path / "x.tar", [("a.json", json.dumps(messages).encode())])
    template = "{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
    with pytest.raises(SourceError, match=r"shard 'x\.tar', member 'a\.json' at byte 0: chat_template"):
        load_block(path, tokenizer=TokenizerSpec(file=str(tiny_tokenizer)), chat_template=template)


def test_damaged_shards_are_errors_naming_shard_member_and_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("a.npy", ids_member([1, 2])), ("b.npy", ids_member(range(300)))])
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with pytest.raises(SourceError, match=r"shard 'x\.tar', member 'b\.npy' at byte 1024: the shard is cut"):
        load_block(path)
    path.write_bytes(b"garbage " * 200)
    with pytest.raises(SourceError, match=r"shard 'x\.tar' at byte 0: there is no tar header"):
        load_block(path)


@pytest.mark.parametrize("content", [b"", bytes(10240)])
def test_a_shard_without_samples_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"shard 'x\.tar' at byte 0: there are no samples"):
        load_block(path)


def test_duplicate_keys_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"shard 'x\.tar', member 'a\.npy' at byte 4096: duplicate key 'a'"):
        load_block(write_tar(tmp_path / "x.tar", [*id_files(), *id_files()[:1]]))


def test_an_offset_behind_the_end_is_an_error(tmp_path: Path) -> None:
    shard = shard_at(write_tar(tmp_path / "x.tar", id_files()))
    loader = BlockLoader({"s": DecodingSpec(name="s")})
    for offset in (512, 4096, 512 * 2000):
        with pytest.raises(SourceError, match=f"at byte {offset}: there (is no tar header|are no samples)"):
            loader.load(BlockRequest("s", shard, offset, 0))


def test_a_shard_that_went_missing_is_named_at_once(tmp_path: Path) -> None:
    loader = BlockLoader({"s": DecodingSpec(name="s")}, sleep=lambda _: pytest.fail("waited for a missing file"))
    with pytest.raises(SourceError, match=r"shard 'gone\.tar': there is no file"):
        loader.load(BlockRequest("s", Shard("gone.tar", str(tmp_path / "gone.tar"), 1), 0, 0))


def test_a_failed_read_is_tried_again_and_at_last_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.mkdir()  # reading a folder fails, as a read on a network file system may
    pauses: list[float] = []

    def sleep(pause: float) -> None:
        pauses.append(pause)
        if len(pauses) == 2:
            path.rmdir()
            write_tar(path, id_files())

    loader = BlockLoader({"s": DecodingSpec(name="s")}, sleep)
    request = BlockRequest("s", Shard("x.tar", str(path), 1), 0, 0)
    assert loader.load(request).count == 4
    assert pauses == [0.1, 0.5]
    path.unlink()
    path.mkdir()
    with pytest.raises(
        SourceError, match=r"shard 'x\.tar' at byte 0: reading .*x\.tar' failed 4 times: .*Is a directory"
    ):
        loader.load(request)


def test_specs_travel_between_processes(tiny_tokenizer: Path) -> None:
    spec = DecodingSpec(name="s", tokenizer=TokenizerSpec(file=str(tiny_tokenizer)), date="2025-01-01")
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_formats_that_need_a_tokenizer_are_refused_without(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source 's': format='text' needs a tokenizer"):
        DecodingSpec(name="s", format=SampleFormat.TEXT)
    with pytest.raises(ConfigError, match="names no tokenizer"):
        load_block(write_tar(tmp_path / "x.tar", [("a.txt", b"text")]))


@pytest.mark.parametrize(("name", "count"), [("testgz", 1000), ("compressed", 3)])
def test_real_shards_of_compressed_text_load_whole(tiny_tokenizer: Path, name: str, count: int) -> None:
    spec = DecodingSpec(name="s", tokenizer=TokenizerSpec(file=str(tiny_tokenizer)), block_bytes=400_000)
    blocks = load_all(BlockLoader({"s": spec}), "s", shard_at(shared(f"data/wds/{name}.tar")))
    assert sum(block.count for block in blocks) == count
    assert not any(block.faults for block in blocks)


@pytest.mark.parametrize(("name", "extension"), [("mpdata", "mp"), ("tendata", "ten")])
def test_real_shards_of_other_data_say_which_members_they_have_and_what_is_read(name: str, extension: str) -> None:
    block = load_block(shared(f"data/wds/{name}.tar"))
    assert len(block.faults) == block.count
    assert f"members are '000000.{extension}', none of which is read; the formats known are" in str(block.faults[0])


@pytest.mark.parametrize("vocab_size", [0, (1 << 32) + 1])
def test_a_vocabulary_that_ids_cannot_have_is_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"source 'docs': vocab_size={vocab_size} must be 1"):
        DecodingSpec(name="docs", vocab_size=vocab_size)


UNREAD = [
    ("mask.npy", [("a.npy", ids_member([1, 2])), ("a.mask.npy", ids_member([0, 1], "|u1"))]),
    ("json", [("a.txt", b"text"), ("a.json", b"{}")]),
    ("jpg", [("a.txt", b"text"), ("a.jpg", b"picture")]),
    ("loss_mask.npy", [("a.txt", b"text"), ("a.loss_mask.npy", ids_member([1], "|u1"))]),
]


@pytest.mark.parametrize(("extension", "members"), UNREAD, ids=[extension for extension, _ in UNREAD])
@pytest.mark.parametrize("every", [True, False], ids=["all samples have it", "one has it"])
def test_a_member_that_nobody_reads_is_refused_unless_the_source_names_it(
    tmp_path: Path, tiny_tokenizer: Path, extension: str, members: list[tuple[str, bytes]], every: bool
) -> None:
    content, beside = members
    others = [(name.replace("a.", "b.", 1), data) for name, data in (members if every else [content])]
    path = write_tar(tmp_path / "x.tar", [*members, *others])
    settings = {"format": content[0].partition(".")[2].replace("npy", "tokens").replace("txt", "text")}
    tokenizer = None if settings["format"] == "tokens" else TokenizerSpec(file=str(tiny_tokenizer))
    block = load_block(path, format=SampleFormat(settings["format"]), tokenizer=tokenizer)
    assert [fault.index for fault in block.faults] == ([0, 1] if every else [0])
    assert beside[0] in str(block.faults[0])
    assert f"ignore_members: [{extension}]" in str(block.faults[0])
    named = load_block(
        path, format=SampleFormat(settings["format"]), tokenizer=tokenizer, ignore_members=frozenset({extension})
    )
    assert not named.faults
    alone = write_tar(tmp_path / "y.tar", [content, (content[0].replace("a.", "b.", 1), content[1])])
    without = load_block(alone, format=SampleFormat(settings["format"]), tokenizer=tokenizer)
    assert named.tokens.tolist() == without.tokens.tolist()
