"""JSON is read as Python reads it, or refused where Python would choose among two meanings."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.text.strict_json import read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_every_value_comes_back(value: object, ascii_only: bool, indent: int | None) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only, indent=indent)) == value


@given(before=VALUES, name=st.text(max_size=4), first=VALUES, second=VALUES, ascii_only=st.booleans())
def test_a_name_that_comes_twice_is_refused_with_both_places(
    before: object, name: str, first: object, second: object, ascii_only: bool
) -> None:
    """Whatever stands before, between and in the two, and however the name is escaped."""
    shown, escaped = json.dumps(name, ensure_ascii=False), json.dumps(name, ensure_ascii=ascii_only)
    head = f'[{json.dumps(before)}, {{"": 1}},\n{{'
    inner = f"{shown}: {json.dumps(first)},\n  {escaped}: {json.dumps(second)}"
    with pytest.raises(ValueError, match="twice, at line 2 column 2 and line 3 column 3; keep one") as caught:
        read_json(f"{head}{inner}}}]")
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[NaN]", "NaN is no number of JSON"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ("[1e999]", "1e999 is beyond what a float holds"),
        ("\ufeff{}", "byte order mark"),
        ("{", "it is not JSON: Expecting"),
        ("[" * 100_000, "it is not JSON: "),
    ],
)
def test_what_is_no_json_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        read_json(text)
    assert math.isfinite(read_json("1e308"))
