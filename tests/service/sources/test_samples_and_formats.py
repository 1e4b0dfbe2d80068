"""Members group into samples as webdataset groups them, and samples decode or say what is wrong with them."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys

from packhorse.errors import SourceError
from packhorse_service.sources.formats import SampleFormat, TokenArrays, decode
from packhorse_service.sources.messages import Conversation
from packhorse_service.sources.sample import BadSample
from packhorse_service.sources.tar.grouping import Sample, group_samples, split_name
from packhorse_service.sources.tar.reader import TarMember, read_members
from tests.service.shards_on_disk import ids_member
from tests.shared_data import shared


def members_of(*files: tuple[str, bytes]) -> list[TarMember]:
    return [TarMember(name, data, 1024 * number, 1024 * (number + 1)) for number, (name, data) in enumerate(files)]


def samples_of(*names: str) -> list[Sample]:
    return list(group_samples(members_of(*((name, b"") for name in names)), shard="x.tar"))


def one(*files: tuple[str, bytes]) -> Sample:
    [sample] = group_samples(members_of(*files), shard="x.tar")
    return sample


def tokens_of(*files: tuple[str, bytes]) -> TokenArrays:
    content = decode(one(*files), SampleFormat.TOKENS)
    assert isinstance(content, TokenArrays)
    return content


def conversation_of(value: object) -> Conversation:
    content = decode(one(("a.json", json.dumps(value).encode())), SampleFormat.AUTO)
    assert isinstance(content, Conversation)
    return content


@given(st.text(st.sampled_from("ab./_\n")))
def test_names_part_where_webdataset_parts_them(name: str) -> None:
    key, extension = base_plus_ext(name)
    assert split_name(name) == (key or "", (extension or "").lower().removesuffix(".gz"))


@pytest.mark.parametrize("name", ["compressed.tar", "mpdata.tar", "tendata.tar", "testgz.tar"])
def test_real_shards_group_as_webdataset_groups_them(name: str) -> None:
    with shared(f"data/wds/{name}").open("rb") as stream:
        members = list(read_members(stream, shard=name))
    theirs = group_by_keys({"fname": member.name, "data": member.data, "__url__": name} for member in members)
    ours = list(group_samples(members, shard=name))
    assert [sample.key for sample in ours] == [sample["__key__"] for sample in theirs]


def test_consecutive_members_of_one_key_are_one_sample() -> None:
    first, second = samples_of("d/a.txt", "d/a.loss_mask.npy", "README", "d/b.v2.TXT.gz")
    assert (first.key, list(first.members), first.next_offset) == ("d/a", ["txt", "loss_mask.npy"], 3 * 1024)
    assert (second.key, list(second.members), second.next_offset) == ("d/b", ["v2.txt"], None)


@pytest.mark.parametrize(
    "names", [("a.txt", "a.txt"), ("a.txt", "a.TXT"), ("a.txt", "a.txt.gz"), ("a.txt", "b.txt", "a.json")]
)
def test_a_key_that_comes_twice_is_an_error_naming_shard_and_key(names: tuple[str, ...]) -> None:
    with pytest.raises(SourceError, match=r"shard 'x\.tar', member 'a\..*duplicate key 'a'"):
        samples_of(*names)


def test_text_is_decoded_also_from_gzip_members() -> None:
    assert decode(one(("a.txt", "é\n".encode())), SampleFormat.AUTO) == "é\n"
    assert decode(one(("a.txt.gz", gzip.compress(b"packed"))), SampleFormat.TEXT) == "packed"
    with pytest.raises(BadSample, match="not a whole gzip file"):
        decode(one(("a.txt.gz", gzip.compress(b"packed")[:-3])), SampleFormat.TEXT)


def test_text_that_is_not_utf_8_is_refused_with_the_byte() -> None:
    with pytest.raises(BadSample, match="not UTF-8 at byte 3") as caught:
        decode(one(("a.txt", b"caf\xe9")), SampleFormat.AUTO)
    assert caught.value.member is not None
    assert caught.value.member.name == "a.txt"


def test_unknown_extensions_are_refused_with_what_is_there_and_what_is_known() -> None:
    with pytest.raises(
        BadSample, match=r"'a\.ten'.*text \(\.txt\), messages \(\.json\), tokens \(\.npy or \.tokens\.npy\)"
    ):
        decode(one(("a.ten", b"")), SampleFormat.AUTO)
    with pytest.raises(BadSample, match=r"'a\.txt'; format 'tokens' reads \.npy or \.tokens\.npy"):
        decode(one(("a.txt", b"")), SampleFormat.TOKENS)


def test_auto_refuses_to_choose_between_two_formats() -> None:
    sample = one(("a.json", b"{}"), ("a.txt", b"caption"))
    with pytest.raises(BadSample, match="fit the formats text and messages"):
        decode(sample, SampleFormat.AUTO)
    assert decode(sample, SampleFormat.TEXT, unread={"json"}) == "caption"
    assert decode(sample, SampleFormat.AUTO, unread={"json"}) == "caption"
    with pytest.raises(
        BadSample, match=r"format 'text' does not read this member, but \.txt.*ignore_members: \[json\]"
    ):
        decode(sample, SampleFormat.TEXT)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i4", "<u8", ">i8", "|u1", "|i1"])
def test_ids_of_any_integer_dtype_and_byte_order_are_read(dtype: str) -> None:
    for name in ("a.npy", "a.tokens.npy", "a.npy.gz"):
        data = ids_member([1, 2, 100], dtype)
        packed = gzip.compress(data) if name.endswith(".gz") else data
        assert tokens_of((name, packed)).ids.tolist() == [1, 2, 100]


def test_ids_in_a_header_of_another_version_or_layout_are_read() -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.arange(5), version=(2, 0))
    assert tokens_of(("a.npy", stream.getvalue())).ids.tolist() == [0, 1, 2, 3, 4]
    header = b"{'shape':(2,), 'fortran_order':False, 'descr':'<u2'}\n"
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\1\0\2\0"
    assert tokens_of(("a.npy", raw)).ids.tolist() == [1, 2]


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}, None], dtype=object), allow_pickle=True)
    return stream.getvalue()


def saved(values: np.ndarray[Any, Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (saved(np.zeros(3, np.float32)), "dtype is float32; ids must be integers"),
        (saved(np.zeros(3, bool)), "dtype is bool"),
        (saved(np.zeros((2, 3), np.int32)), r"shape is \(2, 3\)"),
        (saved(np.asfortranarray(np.zeros((2, 3), np.int32))), "Fortran order"),
        (saved(np.array(5)), r"shape is \(\)"),
        (saved(np.array(["a"])), "holds <U1 values"),
        (saved(np.zeros(2, [("x", "<i4")])), "are not read here"),
        (pickled(), "holds object values"),
        (ids_member([1, 2, 3])[:-1], "the array is cut"),
        (ids_member([1, 2, 3]) + b"\0", "3 values .* 13 follow"),
        (b"\x93NUMPY\x01\x00", "not an .npy file"),
        (b"\x93NUMPY\x09\x00" + bytes(20), "not an .npy file"),
        (b"PK\3\4", "not an .npy file"),
        (b"", "not an .npy file"),
    ],
)
def test_arrays_that_are_not_a_row_of_integers_are_refused(data: bytes, error: str) -> None:
    with pytest.raises(BadSample, match=error):
        tokens_of(("a.npy", data))


def test_loss_masks_are_zeros_and_ones_as_long_as_the_ids() -> None:
    ids = ("a.npy", ids_member([5, 6, 7]))
    for mask in (np.array([0, 1, 1]), np.array([False, True, True]), np.array([0.0, 1.0, 1.0])):
        loaded = tokens_of(("a.loss_mask.npy", saved(mask)), ids).loss_mask
        assert loaded is not None
        assert loaded.tolist() == [0, 1, 1]
    with pytest.raises(BadSample, match=r"loss weight 0\.5; .*fractional"):
        tokens_of(("a.loss_mask.npy", saved(np.array([0, 0.5, 1]))), ids)
    with pytest.raises(BadSample, match="2 values and the sample has 3 ids"):
        tokens_of(("a.labels.npy", ids_member([1, 2])), ids)


def test_a_sample_with_ids_twice_is_refused() -> None:
    with pytest.raises(BadSample, match="both"):
        tokens_of(("a.npy", ids_member([1])), ("a.tokens.npy", ids_member([1])))


def test_messages_come_as_a_list_or_with_tools() -> None:
    hello = {"role": "user", "content": "hello"}
    assert conversation_of([hello]) == Conversation([hello])
    tool = {"name": "f", "parameters": {}}
    wrapped = {"type": "function", "function": tool}
    assert conversation_of({"messages": [hello], "tools": [tool]}) == Conversation([hello], [wrapped])
    assert conversation_of({"messages": [hello], "tools": json.dumps([wrapped])}).tools == [wrapped]


def test_content_may_be_text_parts_and_null_beside_calls_whose_arguments_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    user, assistant, answer = conversation_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ]
    ).messages
    assert user["content"] == "ab"
    assert assistant["content"] is None
    assert assistant["tool_calls"] == [
        {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    ]
    assert answer == {"role": "tool", "tool_call_id": "1", "content": ""}


def user(content: object, **more: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"text": "x"}, "fields are 'text'"),
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "message 1 must be an object"),
        ([{"role": "narrator", "content": ""}], 'message 1 has role "narrator"; roles are system,'),
        ([{"content": ""}], "has role null"),
        (user(None), r"message 1 \(user\) has content null"),
        (user(5), "has content 5"),
        (user([{"type": "image_url", "image_url": {}}]), "part of type \"image_url\"; only parts of type 'text'"),
        (user([{"type": "text"}]), "the text belongs in 'text'"),
        (user("x", tool_calls=[{"function": {"name": "f"}}]), "only an assistant's"),
        (user("x", loss_weight=1.0), r"loss_weight=1\.0"),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], r"weight=0\.5; .*fractional"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "must be an object"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "must have 'function'"),
        ([{"role": "assistant", "tool_calls": "f()"}], "must be a list"),
        ({"messages": user("x"), "tools": "nothing"}, "tools: it is not JSON"),
        ({"messages": user("x"), "tools": [1]}, "list of objects"),
    ],
)
def test_malformed_conversations_are_refused_with_the_message_at_fault(value: object, error: str) -> None:
    with pytest.raises(BadSample, match=error):
        conversation_of(value)


def test_weights_that_say_what_the_mask_says_are_accepted() -> None:
    weighted = [
        {"role": "user", "content": "a", "loss_weight": 0.0},
        {"role": "assistant", "content": "b", "loss_weight": 1},
    ]
    assert len(conversation_of(weighted).messages) == 2


@pytest.mark.parametrize("data", [b"{", b"", b"[" * 100_000, b"\xff"])
def test_malformed_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadSample, match=r"not JSON|not UTF-8"):
        decode(one(("a.json", data)), SampleFormat.AUTO)
