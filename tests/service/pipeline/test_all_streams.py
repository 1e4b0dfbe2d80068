"""Further streams in a configuration: what they must be, and ``packhorse check`` of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from packhorse.errors import ConfigError
from packhorse_service.commands import app
from packhorse_service.config.serve_config import load_config

CONTRACT = {"seq_length": 4096, "global_batch_size": 16, "vocab_size": 32_000}
SOURCES = {"docs": {"shards": "no-such.tar"}}


def written(folder: Path, streams: dict[str, Any], **sections: Any) -> Path:
    path = folder / "feed.yaml"
    path.write_text(yaml.safe_dump({"contract": CONTRACT, "sources": SOURCES, "streams": streams, **sections}))
    return path


def refusal(folder: Path, streams: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(written(folder, streams))
    return [line.strip() for line in str(error.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("stream", "line"),
    [
        ({}, "streams.validation.sources: is required"),
        ({"sources": {}}, "streams.validation.sources={}: dictionary should have at least 1 item"),
        (
            {"sources": {"x": {"shards": "a", "epochs": "endless"}}},
            "streams.validation.sources.x.epochs='endless' must be a number: a pass over the data ends",
        ),
        (
            {"sources": SOURCES, "mixing": {"on_end": "stop"}},
            "streams.validation.mixing.on_end='stop' must be 'go_on': a pass is over all the data",
        ),
        (
            {"sources": SOURCES, "contract": {"remainder": "drop"}},
            "streams.validation.contract.remainder='drop' must be 'pad': a pass is over all the data",
        ),
        (
            {"sources": SOURCES, "contract": {"seq_length": 0}},
            "streams.validation.contract.seq_length=0 must be an integer of at least 1",
        ),
        ({"sources": SOURCES, "layout": {"data": 0}}, "streams.validation.layout.data=0 must be an integer"),
        ({"sources": {"x": {"shards": "a", "weight": -1}}}, "streams.validation.sources.x.weight=-1"),
    ],
    ids=str,
)
def test_what_a_further_stream_cannot_be_is_refused_by_field(tmp_path: Path, stream: dict[str, Any], line: str) -> None:
    (said,) = refusal(tmp_path, {"validation": stream})
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("stream", "line"),
    [
        ({"sorces": {}}, "streams.validation.sorces: unknown field; did you mean 'sources'?"),
        ({"seed": 3}, "streams.validation.seed: unknown field; known here: layout, contract, sources, mixing, packing"),
        ({"packing": {"lookahed": 1}}, "streams.validation.packing.lookahed: unknown field; did you mean 'lookahead'?"),
        (
            {"contract": {"seq_len": 1}},
            "streams.validation.contract.seq_len: unknown field; did you mean 'seq_length'?",
        ),
        (
            {"sources": {"sources": {"shards": "a", "wieght": 2}}},
            "streams.validation.sources.sources.wieght: unknown field; did you mean 'weight'?",
        ),
    ],
    ids=str,
)
def test_an_unknown_field_is_refused_with_the_nearest_that_a_stream_has(
    tmp_path: Path, stream: dict[str, Any], line: str
) -> None:
    assert line in refusal(tmp_path, {"validation": {"sources": SOURCES, **stream}})


@pytest.mark.parametrize("name", ["contract", "sources", "streams", "packing"])
def test_a_stream_may_have_the_name_of_a_section(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, {name: {"sources": SOURCES}})
    assert list(load_config(path).streams) == [name]
    assert refusal(tmp_path, {name: {"sources": SOURCES, "sorces": 1}}) == [
        f"streams.{name}.sorces: unknown field; did you mean 'sources'?"
    ]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("train", "streams.train: the top level describes the stream 'train'; give it another name"),
        ("", "streams.: a stream's name must have 1 … 64 characters"),
        ("x" * 65, f"streams.{'x' * 65}: a stream's name must have 1 … 64 characters"),
    ],
)
def test_a_name_that_no_further_stream_can_have_is_refused(tmp_path: Path, name: str, line: str) -> None:
    assert refusal(tmp_path, {name: {"sources": SOURCES}}) == [line]


# packhorse check --------------------------------------------------------------------------------------


def check(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", *map(str, arguments)])


def test_check_looks_at_every_stream(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "validation": {"sources": SOURCES, "contract": {"seq_length": 8192}},
            "broken": {"sources": SOURCES, "contract": {"micro_batch_size": 4}},
        },
    )
    done = check(path)
    assert done.exit_code == 1
    assert "stream validation" in done.stdout
    assert done.stdout.count("the contract does not hold") == 1
    assert done.stdout.index("stream broken") < done.stdout.index("MBS_ONLINE")
    found = json.loads(check(path, "--json").stdout)
    assert (found["ok"], found["violations"]) == (False, [])
    assert {name: report["ok"] for name, report in found["streams"].items()} == {"validation": True, "broken": False}
    rows = {name: report["derived"]["row_slots"] for name, report in found["streams"].items()}
    assert (found["derived"]["row_slots"], rows) == (4096, {"validation": 8192, "broken": 4096})


def test_what_a_trainer_declares_of_its_contract_is_of_training_and_its_facts_of_every_stream(tmp_path: Path) -> None:
    path = written(tmp_path, {"validation": {"sources": SOURCES, "contract": {"global_batch_size": 8}}})
    trainer = tmp_path / "trainer.yaml"
    trainer.write_text(yaml.safe_dump({"contract": {"global_batch_size": 16}, "trainer": {"world_size": 2}}))
    found = json.loads(check(path, "--trainer", trainer, "--json").stdout)
    for report in (found, found["streams"]["validation"]):
        assert [violation["rule"] for violation in report["violations"]] == ["WORLD"]


def test_an_error_of_a_further_stream_names_it(tmp_path: Path) -> None:
    done = check(written(tmp_path, {"validation": {"sources": SOURCES, "contract": {"seq_length": None}}}))
    assert done.exit_code == 1
    assert "streams.validation.contract.seq_length: required" in done.stderr
    packing = {"packing": {"window": 2}, "contract": {"packing": "none", "micro_batch_size": 1}}
    done = check(written(tmp_path, {"validation": {"sources": SOURCES, **packing}}))
    assert "streams.validation.packing.window=2 needs rows that differ" in done.stderr
