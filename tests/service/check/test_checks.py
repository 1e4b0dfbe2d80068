"""``packhorse check``: the handshake's rules offline, for a person and for a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from packhorse.contract.batch_contract import BatchContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.rules import RULES, RUNTIME_RULES
from packhorse_service.check.length_bound import fill_bound
from packhorse_service.commands import app
from tests.service.shards_on_disk import save_tiny_tokenizer

CONTRACT = {"seq_length": 4096, "global_batch_size": 16, "vocab_size": 32_000}
VIOLATION = {"rule", "severity", "field", "want", "got", "message", "remedy"}


def check(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["check", *map(str, arguments)])


def written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def feed(folder: Path, contract: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A configuration whose shards do not exist: checking reads none."""
    content = {"contract": {**CONTRACT, **(contract or {})}, "sources": {"docs": {"shards": "no-such.tar"}}, **sections}
    return written(folder / "feed.yaml", content)


def report(*arguments: str | Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(check(*arguments, "--json").stdout)
    return loaded


def test_a_contract_that_holds_ends_with_0_and_says_so(tmp_path: Path) -> None:
    done = check(feed(tmp_path))
    assert done.exit_code == 0
    assert "the contract holds" in done.stdout
    assert "not checked: WORLD, as nobody declared world_size" in done.stdout


def test_a_broken_contract_ends_with_1_and_shows_every_rule_and_remedy(tmp_path: Path) -> None:
    done = check(feed(tmp_path, {"micro_batch_size": 4, "seq_length": 4098}, layout={"context": 2}))
    assert done.exit_code == 1
    for said in ("MBS_ONLINE", "CP_LENGTH", "PACK_ALIGN", "micro_batch_size is 4, must be 1", "use 4096 or 4100"):
        assert said in done.stdout
    assert "the contract does not hold" in done.stdout


def test_a_warning_is_shown_and_does_not_fail(tmp_path: Path) -> None:
    path = feed(tmp_path, {"loss_reduction": "mean"})
    assert check(path).exit_code == 0
    found = report(path)
    assert found["ok"] is True
    assert [(v["rule"], v["severity"]) for v in found["violations"]] == [("PER_TOKEN_LOSS", "warn")]


def test_the_json_has_exactly_its_schema(tmp_path: Path) -> None:
    found = report(feed(tmp_path, {"micro_batch_size": 4}))
    assert found.keys() == {"ok", "violations", "derived"}
    (violation,) = found["violations"]
    assert violation.keys() == VIOLATION
    assert (found["ok"], violation["rule"], violation["got"], violation["want"]) == (False, "MBS_ONLINE", "4", "1")
    assert violation["message"] == "micro_batch_size is 4, must be 1"


def test_derived_shows_what_follows_from_the_layout(tmp_path: Path) -> None:
    layout = {"data": 2, "context": 2, "tensor": 4, "pipeline": 2, "sequence_parallel": True}
    derived = report(feed(tmp_path, {"readers": "tensor_zero", "segment_multiple": 4}, layout=layout))["derived"]
    expected = {
        "layout": "DP2·CP2·TP4·PP2 SP",
        "world_size": 32,
        "readers": 8,
        "packing": "online",
        "segment_multiple": 4,
        "default_segment_multiple": 8,
        "pack_multiple": 8,
        "row_multiple": 8,
        "row_slots": 4096,
        "fixed_width": True,
        "num_microbatches": 8,
        "wire_bytes_per_token": 2.125,
    }
    assert {name: derived[name] for name in expected} == expected
    assert {"rule": "MTP", "missing": ["mtp_num_layers"]} in derived["not_checked"]


def test_a_window_where_all_rows_cost_the_same_is_refused(tmp_path: Path) -> None:
    done = check(feed(tmp_path, {"packing": "none"}, packing={"window": 2}))
    assert done.exit_code != 0
    assert "packing.window=2" in done.stderr


@pytest.mark.parametrize(
    ("vocab_size", "partition", "expected"),
    [(32_000, "whole", 2.125), (100_000, "whole", 4.125), (100_000, "zigzag", 8.125)],
)
def test_bytes_on_the_wire_follow_the_vocabulary_and_who_cuts(
    tmp_path: Path, vocab_size: int, partition: str, expected: float
) -> None:
    path = feed(tmp_path, {"vocab_size": vocab_size, "partition": partition}, layout={"context": 2})
    assert report(path)["derived"]["wire_bytes_per_token"] == expected


def test_the_world_of_the_job_is_compared_with_the_layout(tmp_path: Path) -> None:
    path = feed(tmp_path, layout={"data": 2, "context": 2})
    assert check(path, "--world", "4").exit_code == 0
    (violation,) = report(path, "--world", "8")["violations"]
    assert (violation["rule"], violation["remedy"]) == ("WORLD", "set layout.data to 4")


def test_a_trainer_is_checked_as_at_the_handshake(tmp_path: Path) -> None:
    trainer = {
        "layout": {"data": 4},
        "contract": {"seq_length": 2048},
        "trainer": {"transformer_impl": "local", "cuda_graph": "full_iteration", "cuda_graph_modules": ["attn"]},
        "window": 1,
    }
    done = report(feed(tmp_path), "--trainer", written(tmp_path / "trainer.yaml", trainer))
    rules = [violation["rule"] for violation in done["violations"]]
    assert rules == ["SEQ_LENGTH_MATCH", "WORLD", "GRAPH_ATTENTION", "THD_BACKEND", "WINDOW"]
    assert "WINDOW" not in {each["rule"] for each in done["derived"]["not_checked"]}


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"trainer": {"transformer_imp": "local"}}, "transformer_imp: unknown field; did you mean 'transformer_impl'"),
        ({"contract": {"seq_lenght": 1}}, "contract.seq_lenght: unknown field; did you mean 'seq_length'"),
        ({"windows": 4}, "windows: unknown field; did you mean 'window'"),
        ({"trainer": {"stack": "megatron"}}, "trainer.stack='megatron'"),
        ({"contract": {"seq_length": 0}}, "seq_length=0 must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_the_trainers_file_is_named_with_the_nearest(
    tmp_path: Path, trainer: dict[str, Any], said: str
) -> None:
    done = check(feed(tmp_path), "--trainer", written(tmp_path / "trainer.yaml", trainer))
    assert done.exit_code == 1
    assert said in done.stderr


def test_the_vocabulary_is_the_tokenizers_where_none_is_named(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    assert check(feed(tmp_path, {"vocab_size": None}, tokenizer="tokenizer.json")).exit_code == 0
    done = check(feed(tmp_path, {"vocab_size": None}))
    assert (done.exit_code, "contract.vocab_size: required" in done.stderr) == (1, True)


def test_an_invalid_multiple_is_refused(tmp_path: Path) -> None:
    for multiple in (0, -4, 2.5):
        assert check(feed(tmp_path, {"segment_multiple": multiple})).exit_code == 1


@pytest.mark.parametrize("rule", [*RULES, *RUNTIME_RULES], ids=lambda rule: rule.id)
def test_every_rule_is_explained(rule: Any) -> None:
    done = check("--explain", rule.id.lower())
    assert done.exit_code == 0
    assert rule.documentation.summary in done.stdout


def test_a_rule_that_is_not_there_is_named_with_the_nearest() -> None:
    done = check("--explain", "SEGMENT_ALIN")
    assert (done.exit_code, "did you mean SEGMENT_ALIGN" in done.stderr) == (1, True)


def test_nothing_to_check_is_an_error() -> None:
    assert check().exit_code == 1


def test_lengths_bound_the_useful_fill(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 5, 9000, 0]))
    path = feed(tmp_path, layout={"context": 2})
    assert report(path, "--lengths", tmp_path / "lengths.npy")["derived"]["lengths"] == {
        "samples": 4,
        "left_out": 2,
        "useful_slots": 8,
        "packs_at_least": 1,
        "useful_fill_at_most": round(8 / 12, 6),
    }


def test_lengths_may_count_ids_of_which_the_last_is_only_a_target(tmp_path: Path) -> None:
    np.save(tmp_path / "slots.npy", np.array([3, 5, 0]))
    np.save(tmp_path / "ids.npy", np.array([4, 6, 1]))
    path = feed(tmp_path)
    slots = report(path, "--lengths", tmp_path / "slots.npy")["derived"]["lengths"]
    assert report(path, "--lengths", tmp_path / "ids.npy", "--ids")["derived"]["lengths"] == slots


@pytest.mark.parametrize(("packing", "expected"), [("online", 8 / 12), ("none", 8 / 32), ("concat", 1.0)])
def test_the_bound_follows_the_packing(packing: str, expected: float) -> None:
    layout = ParallelLayout(context=2)
    declared = BatchContract(packing=packing, isolate_documents=False)  # type: ignore[arg-type]
    contract = resolve(declared, layout, seq_length=16, global_batch_size=1, vocab_size=10)
    assert fill_bound(np.array([3, 5]), contract)["useful_fill_at_most"] == round(expected, 6)
    assert fill_bound(np.array([], dtype=np.int64), contract)["useful_fill_at_most"] == 0.0


@pytest.mark.parametrize(
    "content",
    [
        np.array([[1]]),
        np.array([0.5]),
        np.array([None], dtype=object),
        np.array([4, -3]),
        np.array([2**31]),
        np.array([2**64 - 1], dtype=np.uint64),
    ],
)
def test_lengths_of_another_kind_are_refused(tmp_path: Path, content: Any) -> None:
    np.save(tmp_path / "lengths.npy", content, allow_pickle=True)
    done = check(feed(tmp_path), "--lengths", tmp_path / "lengths.npy")
    assert (done.exit_code, "--lengths" in done.stderr) == (1, True)
