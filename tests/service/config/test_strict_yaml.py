"""A YAML file says each thing once, in finite numbers, or is refused with the lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.errors import ConfigError
from packhorse_service.config.yaml_check import load_mapping


def load(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "feed.yaml"
    path.write_text(text, "utf-8")
    return load_mapping(path, "configuration")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\nb: 2\na: 3\n", "'a' is given twice, in lines 1 and 3"),
        ("s:\n  docs: {x: 1}\n  docs: {x: 2}\n", "'docs' is given twice, in lines 2 and 3"),
        ("a: {b: 1,\n b: 2}", "'b' is given twice, in lines 1 and 2"),
        ("l: [{b: 1,\n b: 2}]", "'b' is given twice, in lines 1 and 2"),
        ("a: 1\n'a': 2", "'a' is given twice, in lines 1 and 2"),
        ("a: {1: x,\n true: y}", "twice, in lines 1 and 2"),
        ("x: &x {a: 1}\ny: {<<: *x, a: 2,\n a: 3}\n", "'a' is given twice, in lines 2 and 3"),
        ("a: .nan", r"a=nan: must be a finite number"),
        ("a: [-.inf]", r"a\.0=-inf: must be a finite"),
        ("a: 1.0e+400", "a=inf: must be a finite"),
    ],
)
def test_what_has_two_meanings_or_none_is_refused(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(tmp_path, text)


def test_what_is_merged_may_be_given_anew(tmp_path: Path) -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {<<: *x, a: 2}\nz: {<<: *y, a: 3}\n"
    assert load(tmp_path, text) == {"x": {"a": 1, "b": 1}, "y": {"a": 2, "b": 1}, "z": {"a": 3, "b": 1}}
