"""``packhorse plan`` as a person and a program use it: tables, JSON, pictures, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from packhorse_service.commands import app
from tests.service.preview.test_inspect import feed, inspected

KEYS = Path(__file__).parents[3] / "docs" / "plan.md"
SIZES = ("--seq-length", "64", "--data-parallel", "2", "--global-batch-size", "4")

OPTIONS = {"plan": ("--lengths", "--steps", "--window", "--ids", "--plot"), "inspect": ("--step", "--out", "--rank")}


def plan(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(2, 100, 200))
    return tmp_path / "lengths.npy"


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all leaves."""
    if isinstance(value, dict):
        for key, each in value.items():
            under = "*" if path == "over_length.policies" else key
            yield from keys_of(each, f"{path}.{under}".lstrip("."))
    elif isinstance(value, list):
        for each in value:
            yield from keys_of(each, f"{path}[]")
    else:
        yield path


def documented(command: str) -> set[str]:
    section = KEYS.read_text(encoding="utf-8").partition(f"## `packhorse {command}`")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


# What is told --------------------------------------------------------------------------------------------


def test_the_json_has_exactly_the_documented_keys(tmp_path: Path, lengths: Path) -> None:
    config = feed(tmp_path, loss_reduction="mean")  # warned of
    found = [
        set(keys_of(json.loads(plan(*arguments, "--json").stdout)))
        for arguments in ((config,), ("--lengths", lengths, *SIZES, "--max-segments", "4"))
    ]
    assert set.union(*found) == documented("plan")
    assert set(keys_of(inspected(config, "--step", "0"))) == documented("inspect")


def test_the_json_is_the_same_every_time(tmp_path: Path, lengths: Path) -> None:
    config = feed(tmp_path)
    for arguments in ((config,), ("--lengths", lengths, *SIZES, "--window", "2")):
        first, second = plan(*arguments, "--json"), plan(*arguments, "--json")
        assert first.exit_code == 0
        assert first.stdout == second.stdout


def test_a_person_sees_the_figures_the_policies_and_one_recommendation(tmp_path: Path, lengths: Path) -> None:
    for arguments in ((feed(tmp_path),), ("--lengths", lengths, *SIZES)):
        shown = plan(*arguments)
        assert shown.exit_code == 0
        for said in ("steps", "slot fill", "useful fill", "longest wait", "imbalance", "truncate_left", "seq_length"):
            assert said in shown.stdout
        assert shown.stdout.count("Recommended:") == 1
    assert "serve would stop: --over-length is error, and sample" in " ".join(shown.stdout.split())


def test_sources_are_shown_with_their_weights(tmp_path: Path) -> None:
    shown = plan(feed(tmp_path)).stdout
    assert re.search(r"docs .* 50\.0%", shown)
    assert re.search(r"chat .* 50\.0%", shown)


def test_what_serving_would_warn_of_is_said(tmp_path: Path) -> None:
    assert "warning: PER_TOKEN_LOSS" in plan(feed(tmp_path, loss_reduction="mean")).stdout


def test_ids_count_one_more_than_slots(tmp_path: Path) -> None:
    np.save(tmp_path / "slots.npy", np.array([64, 10]))
    np.save(tmp_path / "ids.npy", np.array([65, 11, 1]))
    slots = json.loads(plan("--lengths", tmp_path / "slots.npy", *SIZES, "--json").stdout)
    ids = json.loads(plan("--lengths", tmp_path / "ids.npy", "--ids", *SIZES, "--json").stdout)
    assert ids["fill"] == slots["fill"]
    assert (slots["samples"]["empty"], ids["samples"]["empty"]) == (0, 1)


@pytest.mark.parametrize("contract", [{}, {"packing": "none"}], ids=["online", "none"])
def test_the_plot_is_a_png_with_something_on_it(tmp_path: Path, contract: dict[str, Any]) -> None:
    done = plan(feed(tmp_path, **contract), "--plot", tmp_path / "plan.png")
    assert done.exit_code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(tmp_path / "plan.png")[:, :, :3]
    panels = [half for row in np.array_split(pixels, 1 if contract else 2) for half in np.array_split(row, 2, axis=1)]
    assert all(len(np.unique(panel.reshape(-1, 3), axis=0)) > 10 for panel in panels)


# What is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to plan; name a configuration (FEED.YAML), or give --lengths FILE.npy"),
        (["feed.yaml", "--lengths", "lengths.npy"], "both 'feed.yaml' and --lengths are given"),
        (["feed.yaml", "--window", "2", "--ids"], "--window, --ids: only with --lengths; 'feed.yaml' says it itself"),
        (["--lengths", "lengths.npy", "--data-parallel", "2"], "--seq-length, --global-batch-size: required"),
        (["--lengths", "none.npy", *SIZES], "--lengths 'none.npy' cannot be read"),
        (["--lengths", "lengths.npy", *SIZES[:-1], "5"], "GBS_DIVIDES"),
        (["--lengths", "empty.npy", *SIZES], "nothing to plan: 0 samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_what_to_do(
    lengths: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(lengths.parent)
    np.save("empty.npy", np.array([], dtype=np.int64))
    done = plan(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_help_says_what_each_option_is_for(command: str) -> None:
    shown = CliRunner(env={"COLUMNS": "160", "NO_COLOR": "1"}).invoke(app, [command, "--help"]).stdout
    options = {
        "plan": ("--lengths", "--steps", "--window", "--ids", "--plot"),
        "inspect": ("--step", "--out", "--rank"),
    }
    for option in (*options[command], "--json"):
        assert re.search(rf"{option}\s.*[.]", shown), option
