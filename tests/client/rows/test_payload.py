"""Several arrays in one buffer come back as they were; a table that does not fit its buffer is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from packhorse.errors import ProtocolError
from packhorse.rows.payload import ArrayEntry, bits, from_bits, join_arrays, narrowest, split_arrays

DTYPES = ("|u1", "<u2", "<u4", "<i4", "<i8")
AnyArray = npt.NDArray[Any]

ARRAYS: st.SearchStrategy[dict[str, AnyArray]] = st.dictionaries(
    st.text(max_size=8),
    st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(np.dtype(dtype), st.integers(0, 90))),
    max_size=6,
)


@given(ARRAYS)
def test_arrays_come_back_as_they_were(arrays: dict[str, AnyArray]) -> None:
    table, buffer = join_arrays(arrays)
    found = split_arrays(table, memoryview(buffer))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


@given(ARRAYS)
def test_each_array_starts_at_a_multiple_of_64_bytes_and_is_viewed_in_place(arrays: dict[str, AnyArray]) -> None:
    table, buffer = join_arrays(arrays)
    assert all(entry.offset % 64 == 0 for entry in table)
    assert all(not view.flags.owndata for view in split_arrays(table, memoryview(buffer)).values())
    assert len(buffer) == (table[-1].offset + arrays[table[-1].name].nbytes if table else 0)


def test_bytes_on_the_wire_are_little_endian_whatever_the_machine() -> None:
    numbers = np.array([1, 258], np.dtype(">u4"))
    table, buffer = join_arrays({"a": numbers, "b": numbers.astype("<i8")[::-1]})
    assert bytes(buffer[:8]).hex() == "0100000002010000"
    assert bytes(buffer[64:]).hex() == "02010000000000000100000000000000"
    assert [entry.dtype for entry in table] == ["<u4", "<i8"]


TABLE, BUFFER = join_arrays({"a": np.arange(5, dtype="<u2"), "b": np.arange(7, dtype="<i4")})
FIRST, SECOND = TABLE


@pytest.mark.parametrize(
    "table",
    [
        pytest.param([FIRST, replace(SECOND, offset=0)], id="overlap"),
        pytest.param([FIRST, replace(SECOND, offset=10)], id="unaligned"),
        pytest.param([FIRST, replace(SECOND, offset=128)], id="a gap"),
        pytest.param([replace(FIRST, offset=64), SECOND], id="a gap before the first"),
        pytest.param([replace(FIRST, offset=-64), SECOND], id="an offset before the payload"),
        pytest.param([SECOND, FIRST], id="out of order"),
        pytest.param([FIRST, replace(SECOND, dtype="<f4")], id="a float"),
        pytest.param([FIRST, replace(SECOND, dtype=">i4")], id="big-endian"),
        pytest.param([FIRST, replace(SECOND, dtype="|O")], id="objects"),
        pytest.param([FIRST, replace(SECOND, dtype="")], id="no dtype"),
        pytest.param([FIRST, replace(SECOND, name="a")], id="a name twice"),
        pytest.param([FIRST, replace(SECOND, length=8)], id="beyond the payload"),
        pytest.param([FIRST, replace(SECOND, length=1 << 61)], id="far beyond the payload"),
        pytest.param([FIRST, replace(SECOND, length=6)], id="the payload is longer"),
        pytest.param([FIRST], id="an array is missing"),
        pytest.param([], id="no table"),
        pytest.param([FIRST, SECOND, ArrayEntry("c", "|u1", 1, 128)], id="an array too many"),
        pytest.param([ArrayEntry("c", "|u1", -1, 0), FIRST, SECOND], id="a negative length"),
        pytest.param([FIRST, replace(SECOND, length=-7)], id="a negative length at the end"),
    ],
)
def test_a_table_that_does_not_fit_its_buffer_is_refused(table: list[ArrayEntry]) -> None:
    with pytest.raises(ProtocolError, match="payload"):
        split_arrays(table, memoryview(BUFFER))


@pytest.mark.parametrize("size", [0, 1, 63, 64, len(BUFFER) - 1])
def test_a_short_buffer_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="payload"):
        split_arrays(TABLE, memoryview(BUFFER)[:size])


def test_a_long_buffer_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"{len(BUFFER) + 1} bytes where its table describes {len(BUFFER)}"):
        split_arrays(TABLE, memoryview(BUFFER + b"\0"))


@given(
    st.lists(
        st.builds(
            ArrayEntry,
            st.sampled_from("ab"),
            st.sampled_from(DTYPES),
            st.integers(-9, 40),
            st.sampled_from((-64, 0, 1, 64, 128)),
        ),
        max_size=3,
    ),
    st.binary(max_size=200),
)
def test_any_other_table_is_refused_and_never_fails_otherwise(table: list[ArrayEntry], payload: bytes) -> None:
    try:
        found = split_arrays(table, memoryview(payload))
    except ProtocolError:
        return
    assert {name: len(array) for name, array in found.items()} == {entry.name: entry.length for entry in table}


@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back_as_they_were(flags: list[bool]) -> None:
    packed = bits(flags)
    assert len(packed) == -(-len(flags) // 8)
    assert from_bits(packed, len(flags)).tolist() == flags


def test_the_lowest_bit_is_the_first_flag() -> None:
    assert bits([1, 0, 0, 0, 0, 0, 0, 0, 0, 1]).tolist() == [1, 2]


@pytest.mark.parametrize("count", [0, 8, 17, 1000])
def test_bits_of_another_count_are_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"2 bytes of bits where {count} were promised"):
        from_bits(bits([1] * 9), count)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (1 << 31, "<u4")])
def test_ids_are_16_bits_wide_where_the_vocabulary_allows(vocab_size: int, dtype: str) -> None:
    assert narrowest(vocab_size) == np.dtype(dtype)
    assert 256 ** narrowest(vocab_size).itemsize >= vocab_size
