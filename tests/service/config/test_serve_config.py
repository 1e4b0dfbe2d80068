"""A configuration is accepted as a whole or refused with everything that is wrong, by field and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.contract.batch_contract import BatchContract, Objective, TailPadding
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError
from packhorse_service.config.serve_config import ServeConfig, load_config
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.sources.formats import SampleFormat
from tests.service.corpus import write_source

WHOLE = """
listen: tcp://127.0.0.1:6000
seed: 7
date: "2026-01-02"
tokenizer: tokenizer.json
layout: {data: 2, context: 2, tensor: 2, sequence_parallel: true}
contract:
  seq_length: 8192
  global_batch_size: 64
  partition: zigzag
  tail_padding: extend_last
  objective: sft
sources:
  docs:
    shards: data/docs-{000..003}.tar
    weight: 0.7
    epochs: endless
    over_length: split
  chat:
    shards: [data/chat-000.tar, "data/more-*.tar"]
    format: messages
    chat_template: chat.jinja
    skip_budget: 3
loading: {workers: 4, block_bytes: 65536}
packing: {lookahead: 16}
steps_ahead: 3
keys: true
"""
LEAST = "sources: {docs: {shards: a.tar}}\n"


def load(tmp_path: Path, text: str) -> ServeConfig:
    path = tmp_path / "feed.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> list[str]:
    """The lines of the error, without the file's name at its head."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    head, *lines = str(error.value).splitlines()
    assert "feed.yaml" in head
    return [line.strip() for line in lines]


def test_a_whole_configuration_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, WHOLE)
    assert config.layout == ParallelLayout(data=2, context=2, tensor=2, sequence_parallel=True)
    assert config.contract.seq_length == 8192
    assert (config.contract.tail_padding, config.contract.objective) == (TailPadding.EXTEND_LAST, Objective.SFT)
    assert config.contract.micro_batch_size is None
    docs, chat = config.sources["docs"], config.sources["chat"]
    assert (docs.shards, docs.weight, docs.epochs) == (("data/docs-{000..003}.tar",), 0.7, "endless")
    assert docs.over_length is OverLength.SPLIT
    assert (chat.shards, chat.format) == (("data/chat-000.tar", "data/more-*.tar"), SampleFormat.MESSAGES)
    assert config.tokenizer is not None
    assert config.tokenizer.file == "tokenizer.json"
    assert (config.loading.workers, config.packing.lookahead, config.steps_ahead, config.keys) == (4, 16, 3, True)


def test_only_sources_are_required(tmp_path: Path) -> None:
    config = load(tmp_path, LEAST)
    assert config.layout == ParallelLayout()
    assert config.contract == BatchContract()
    assert (config.sources["docs"].weight, config.sources["docs"].epochs) == (1.0, 1)
    assert config.sources["docs"].over_length is OverLength.ERROR


# Fields ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps_ahaed: 3", "steps_ahaed: unknown field; did you mean 'steps_ahead'?"),
        ("layuot: {}", "layuot: unknown field; did you mean 'layout'?"),
        ("contrct: {}", "contrct: unknown field; did you mean 'contract'?"),
        ("contract: {seq_len: 3}", "contract.seq_len: unknown field; did you mean 'seq_length'?"),
        ("layout: {tensr: 3}", "layout.tensr: unknown field; did you mean 'tensor'?"),
        ("packing: {lookahed: 3}", "packing.lookahed: unknown field; did you mean 'lookahead'?"),
        ("loading: {worker: 3}", "loading.worker: unknown field; did you mean 'workers'?"),
        ("tokenizer: {fil: x}", "tokenizer.fil: unknown field; did you mean 'file'?"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, line: str) -> None:
    assert line in refusal(tmp_path, LEAST + text)


@pytest.mark.parametrize("name", ["docs", "tokenizer", "sources", "packing", "shards"])
def test_an_unknown_field_of_a_source_is_refused_whatever_the_name_of_the_source(tmp_path: Path, name: str) -> None:
    lines = refusal(tmp_path, f"sources: {{{name}: {{shards: a.tar, wieght: 2}}}}")
    assert lines == [f"sources.{name}.wieght: unknown field; did you mean 'weight'?"]


def test_an_unknown_field_like_no_other_is_refused_with_all_that_are_known(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, LEAST + "packing: {zzz: 1}")
    assert line == "packing.zzz: unknown field; known here: algorithm, lookahead, tail_slots, window, hidden_size"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1", "sources: is required"),
        ("sources: {docs: {weight: 1}}", "sources.docs.shards: is required"),
        (LEAST + "tokenizer: {eos_token: x}", "tokenizer.file: is required"),
    ],
)
def test_a_field_that_is_missing_is_named(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text) == [line]


# Values ----------------------------------------------------------------------------------------------


def source(fields: str) -> str:
    return f"sources: {{docs: {{shards: a.tar, {fields}}}}}"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("sources: {}", "sources", "{}"),
        ("sources: [a.tar]", "sources", "['a.tar']"),
        ("sources: {docs: a.tar}", "sources.docs", "'a.tar'"),
        ("sources: {docs: {shards: 3}}", "sources.docs.shards", "3"),
        (source("weight: 0"), "sources.docs.weight", "0"),
        (source("weight: -1"), "sources.docs.weight", "-1"),
        (source("weight: .nan"), "sources.docs.weight", "nan"),
        (source("weight: .inf"), "sources.docs.weight", "inf"),
        (source("weight: heavy"), "sources.docs.weight", "'heavy'"),
        (source("epochs: 0"), "sources.docs.epochs", "0"),
        (source("epochs: 1.5"), "sources.docs.epochs", "1.5"),
        (source("epochs: forever"), "sources.docs.epochs", "'forever'"),
        (source("format: xml"), "sources.docs.format", "'xml'"),
        (source("over_length: cut"), "sources.docs.over_length", "'cut'"),
        (source("open_shards: 0"), "sources.docs.open_shards", "0"),
        (source("open_shards: 2000"), "sources.docs.open_shards", "2000"),
        (source("skip_budget: -1"), "sources.docs.skip_budget", "-1"),
        (LEAST + "seed: -1", "seed", "-1"),
        (LEAST + "seed: 1.5", "seed", "1.5"),
        (LEAST + "date: yesterday", "date", "'yesterday'"),
        (LEAST + "steps_ahead: 1", "steps_ahead", "1"),
        (LEAST + "steps_ahead: many", "steps_ahead", "'many'"),
        (LEAST + "keys: perhaps", "keys", "'perhaps'"),
        (LEAST + "loading: {workers: -1}", "loading.workers", "-1"),
        (LEAST + "loading: {workers: 2.5}", "loading.workers", "2.5"),
        (LEAST + "loading: {block_bytes: 0}", "loading.block_bytes", "0"),
        (LEAST + "packing: {lookahead: 0}", "packing.lookahead", "0"),
        (LEAST + "packing: {hidden_size: 0}", "packing.hidden_size", "0"),
        (LEAST + "packing: {hidden_size: x}", "packing.hidden_size", "'x'"),
        (LEAST + "contract: {packing: offline}", "contract.packing", "'offline'"),
        (LEAST + "contract: {partition: spiral}", "contract.partition", "'spiral'"),
        (LEAST + "contract: {seq_length: 1.5}", "contract.seq_length", "1.5"),
        (LEAST + "contract: {seq_length: 0}", "contract.seq_length", "0"),
        (LEAST + "contract: {global_batch_size: -4}", "contract.global_batch_size", "-4"),
        (LEAST + "layout: {data: two}", "layout.data", "'two'"),
        (LEAST + "layout: {data: 0}", "layout.data", "0"),
        (LEAST + "layout: {order: tp-cp}", "layout.order", "'tp-cp'"),
    ],
)
def test_a_bad_value_is_refused_once_by_field_and_value(tmp_path: Path, text: str, field: str, value: str) -> None:
    (line,) = refusal(tmp_path, text)
    assert line.startswith(f"{field}={value}")
    assert len(line) > len(f"{field}={value}: ")  # and the rule


def test_a_bad_enum_lists_what_is_known(tmp_path: Path) -> None:
    (line,) = refusal(tmp_path, source("over_length: cut"))
    assert all(f"'{policy}'" in line for policy in OverLength)


def test_all_errors_are_listed_at_once(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path,
        """
        steps_ahead: 1
        sedd: 3
        contract: {seq_length: x, partition: spiral}
        sources: {docs: {shards: a.tar, weight: 0}, web: {wieght: 1}}
        packing: {lookahead: 0}
        """,
    )
    fields = ["steps_ahead=1", "sedd:", "contract.seq_length='x'", "contract.partition='spiral'"]
    fields += ["sources.docs.weight=0", "sources.web.shards:", "sources.web.wieght:", "packing.lookahead=0"]
    assert len(lines) == len(fields)
    assert all(any(line.startswith(field) for line in lines) for field in fields)


# Files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["sources: {docs: [", "a: b: c", "\ttab: 1", "date: 2026-13-45", "x: !!python/object:a.b {}"]
)
def test_what_is_not_yaml_is_refused_with_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"feed\.yaml"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["", "[a, b]", "just text", "3"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"feed\.yaml: must be a mapping with at least 'sources'"):
        load(tmp_path, text)


def test_a_key_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert any(line.startswith("3") for line in refusal(tmp_path, LEAST + "3: x"))


def test_a_file_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml' cannot be read"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "feed.yaml"
    path.write_bytes(b"sources: \xff\xfe")
    with pytest.raises(ConfigError, match=r"feed\.yaml' cannot be read"):
        load_config(path)


# What only the plan can tell -------------------------------------------------------------------------


def plan_refusal(tmp_path: Path, text: str) -> str:
    write_source(tmp_path, [[5, 6]])
    config = load(tmp_path, "sources: {docs: {shards: part-000.tar}}\n" + text)
    with pytest.raises(ConfigError) as error:
        plan_stream(config, tmp_path)
    return str(error.value)


@pytest.mark.parametrize("missing", ["seq_length", "global_batch_size", "vocab_size"])
def test_what_the_contract_needs_is_asked_for_by_name(tmp_path: Path, missing: str) -> None:
    values = {"seq_length": 8, "global_batch_size": 1, "vocab_size": 100}
    given = ", ".join(f"{name}: {value}" for name, value in values.items() if name != missing)
    assert f"contract.{missing}" in plan_refusal(tmp_path, f"contract: {{{given}}}")


def test_all_that_the_contract_lacks_is_asked_for_at_once(tmp_path: Path) -> None:
    text = plan_refusal(tmp_path, "contract: {}")
    assert all(f"contract.{name}" in text for name in ("seq_length", "global_batch_size", "vocab_size"))


def test_a_tokenizer_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    text = plan_refusal(tmp_path, "tokenizer: absent.json\ncontract: {seq_length: 8, global_batch_size: 1}")
    assert "absent.json" in text


def test_a_template_that_is_not_there_is_refused_by_its_source(tmp_path: Path) -> None:
    write_source(tmp_path, [[5, 6]])
    config = load(
        tmp_path,
        "sources: {docs: {shards: part-000.tar, chat_template: absent.jinja}}\n"
        "contract: {seq_length: 8, global_batch_size: 1, vocab_size: 100}",
    )
    with pytest.raises(ConfigError, match=r"sources\.docs\.chat_template='absent\.jinja'"):
        plan_stream(config, tmp_path)
