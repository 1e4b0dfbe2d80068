"""Data sets as they are published become shards that load, or an error that names file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from packhorse.errors import ConfigError, SourceError
from packhorse_service.commands import app
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.tokenizer import TokenizerSpec
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.prepare.prepare import PrepareSummary, prepare
from packhorse_service.sources import expand_shards
from packhorse_service.sources.tar.reader import read_members
from tests.service.shards_on_disk import load_all, shard_at
from tests.shared_data import shared


def json_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def written(summary: PrepareSummary) -> list[tuple[str, bytes]]:
    found = []
    for path in summary.shards:
        with path.open("rb") as stream:
            found += [(member.name, member.data) for member in read_members(stream, shard=path.name)]
    return found


def sample_of(tmp_path: Path, row: object, **settings: Any) -> Any:
    """Prepare one row and return the messages or text written for it."""
    summary = prepare([json_lines(tmp_path / "in.jsonl", row)], tmp_path / "out", overwrite=True, **settings)
    [(name, data)] = written(summary)
    return json.loads(data) if name.endswith(".json") else data.decode()


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "plain é", "id": 3}, "plain é"),
        ("plain", "plain"),
        ({"prompt": "a", "completion": "b"}, {"messages": turns("a", "b")}),
        ({"prompt": "a", "response": "b"}, {"messages": turns("a", "b")}),
        ({"question": "a", "answer": "b"}, {"messages": turns("a", "b")}),
        ({"instruction": "a", "input": "x", "output": "b"}, {"messages": turns("a\n\nx", "b")}),
        ({"instruction": "a", "input": "", "output": "b"}, {"messages": turns("a", "b")}),
        ({"messages": turns("a", "b"), "source": "x"}, {"messages": turns("a", "b")}),
        ({"traj": turns("a", "b"), "task_id": 3}, {"messages": turns("a", "b")}),
        ({"prompt": turns("a"), "completion": turns("x", "b")[1:]}, {"messages": turns("a", "b")}),
        ({"prompt": turns("a"), "answer": "b"}, {"messages": turns("a", "b")}),
        ({"prompt": "a", "response": "b", "history": [["x", "y"]]}, {"messages": turns("x", "y", "a", "b")}),
        ({"question": "a", "response": "b", "system_prompt": "", "id": "x"}, {"messages": turns("a", "b")}),
        ({"instruction": "a", "context": "x", "response": "b", "category": "qa"}, {"messages": turns("a\n\nx", "b")}),
    ],
)
def test_forms_are_told_by_their_fields(tmp_path: Path, row: object, expected: object) -> None:
    assert sample_of(tmp_path, row) == expected


def test_share_gpt_turns_become_messages_with_calls_and_tools(tmp_path: Path) -> None:
    row = {
        "system": "be brief",
        "tools": json.dumps([{"name": "f"}]),
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "b"},
        ],
    }
    sample = sample_of(tmp_path, row)
    assert [message["role"] for message in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample["messages"][2] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert sample["tools"] == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "a", "summary": "b"}, "'summary'"),
        ({"prompt": "a", "completion": "b", "rejected": "c"}, "'rejected'"),
        ({"question": "a", "answer": "b", "context": "c"}, "'context'"),
        ({"traj": turns("a", "b"), "reward": 0.0}, "'reward'"),
        ({"conversations": [{"from": "gpt", "value": "a"}], "images": ["x.png"]}, "'images'"),
        ({"conversations": [{"from": "gpt", "value": "a", "images": ["x.png"]}]}, "'images'"),
        ({"messages": turns("a"), "label": True}, "'label'"),
        ({"prompt": {"role": "prompter", "text": "a", "replies": [], "audio": "x"}}, "'audio'"),
    ],
)
def test_a_field_that_no_form_reads_is_refused_by_name_unless_it_is_ignored(
    tmp_path: Path, row: object, named: str
) -> None:
    with pytest.raises(SourceError, match=rf"in\.jsonl, line 1: .*{named}, which nothing reads.*--ignore-field"):
        sample_of(tmp_path, row)
    assert sample_of(tmp_path, row, ignore_fields=[named.strip("'")])


def test_share_gpt_turns_say_whether_they_are_trained_on(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]
    assert sample_of(tmp_path, {"conversations": said})["messages"][1]["weight"] == 0


def test_every_path_of_a_message_tree_is_a_sample(tmp_path: Path) -> None:
    leaves: list[dict[str, Any]] = [{"role": "assistant", "text": text, "replies": []} for text in ("b", "c")]
    tree = {"prompt": {"role": "prompter", "text": "a", "replies": leaves}}
    summary = prepare([json_lines(tmp_path / "in.jsonl", tree)], tmp_path / "out")
    assert [json.loads(data)["messages"] for _, data in written(summary)] == [turns("a", "b"), turns("a", "c")]
    assert (summary.rows, summary.samples) == (1, 2)


def test_a_named_field_is_read_whatever_the_others_are(tmp_path: Path) -> None:
    row = {"text": "no", "body": "yes", "turns": ["a", "b"], "log": [{"from": "human", "value": "c"}]}
    assert sample_of(tmp_path, row, field="body") == "yes"
    assert [turn["role"] for turn in sample_of(tmp_path, row, field="turns")["messages"]] == ["user", "user"]
    assert sample_of(tmp_path, row, field="log") == {"messages": turns("c")}


def test_a_row_of_two_forms_needs_the_format(tmp_path: Path) -> None:
    row = {"instruction": "a", "output": "b", "text": "all of it"}
    with pytest.raises(SourceError, match=r"in\.jsonl, line 1: the row fits several forms, \(text\) and \(instruction"):
        sample_of(tmp_path, row)
    assert sample_of(tmp_path, row, source_format="messages") == {"messages": turns("a", "b")}
    assert sample_of(tmp_path, row, source_format="text") == "all of it"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b'{"text": "a"}\n{"text"\n', r"in\.jsonl, line 2: it is not JSON"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', r"in\.jsonl, line 3: it is not UTF-8 at byte 10"),
        (b'{"query": "a", "gold": 1}\n', r"line 1: .*fields are query, gold; the forms known are \(text\); \(messages"),
        (b"[1]\n", r"line 1: a row must be an object"),
        (b'{"text": "\\ud800"}\n', r"line 1: .*surrogate"),
        (b'{"messages": []}\n', r"line 1: messages must be a list"),
        (b'{"conversations": [{"from": "parrot", "value": "a"}]}\n', "from 'parrot'; speakers known are system, human"),
        (b'{"conversations": [{"from": "function_call", "value": "f()"}]}\n', "function_call turn is not JSON"),
        (b'{"prompt": {"role": "x", "replies": []}}\n', "message of the tree has role 'x'"),
        (b"\n", "there are no rows"),
    ],
)
def test_rows_that_cannot_be_used_are_named_and_leave_nothing_behind(
    tmp_path: Path, content: bytes, error: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=error):
        prepare([path], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_lists_gzip_text_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([{"text": "1"}, "2"]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "3"}\n'))
    (folder / "c.txt").write_text("4\n")
    (folder / "notes.md").write_text("not read")
    summary = prepare([folder], tmp_path / "out")
    assert [data for _, data in written(summary)] == [b"1", b"2", b"3", b"4\n"]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "3"}\n' * 50)[:-9])
    with pytest.raises(SourceError, match=r"b\.jsonl\.gz: its gzip stream is damaged"):
        prepare([folder], tmp_path / "out2")


@pytest.mark.parametrize(("name", "error"), [("a.parquet", "known are .jsonl, .json, .txt"), ("none", "no such file")])
def test_inputs_that_cannot_be_read_are_refused(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(SourceError, match=error):
        prepare([tmp_path / name], tmp_path / "out")
    with pytest.raises(ConfigError, match="inputs is empty"):
        prepare([], tmp_path / "out")
    with pytest.raises(ConfigError, match="source_format='tokens'"):
        prepare([tmp_path / name], tmp_path / "out", source_format="tokens")


def test_shards_are_cut_by_size_and_count_and_named_for_a_config(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "in.jsonl", *({"text": f"{number:04d}"} for number in range(10)))
    by_count = prepare([path], tmp_path / "50% out", max_shard_samples=4)
    by_size = prepare([path], tmp_path / "b", name="docs", max_shard_bytes=8)
    assert [shard.name for shard in by_count.shards] == [f"data-{number:06d}.tar" for number in range(3)]
    assert len(by_size.shards) == 5
    for summary in (by_count, by_size):
        listed = expand_shards([summary.pattern], Path("/"))
        assert [shard.url for shard in listed] == [str(shard) for shard in summary.shards]
        assert [data for _, data in written(summary)] == [b"%04d" % number for number in range(10)]
    assert prepare([path], tmp_path / "c").pattern == str(tmp_path / "c" / "data-000000.tar")


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "in.jsonl", {"text": "a"}, {"question": "b", "answer": "c"})
    first, second = (prepare([path], tmp_path / out).shards[0].read_bytes() for out in ("x", "y"))
    assert first == second


def test_shards_that_are_there_stay_unless_told_otherwise(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "in.jsonl", {"text": "a"}, {"text": "b"})
    assert len(prepare([path], tmp_path / "out", max_shard_samples=1).shards) == 2
    with pytest.raises(ConfigError, match=r"already has data-000000\.tar.*overwrite"):
        prepare([path], tmp_path / "out")
    prepare([path], tmp_path / "out", name="other")
    prepare([path], tmp_path / "out", overwrite=True)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["data-000000.tar", "other-000000.tar"]


def test_prepared_ids_load_as_the_text_and_messages_would(tmp_path: Path, tiny_tokenizer: Path) -> None:
    tokenizer = TokenizerSpec(file=str(tiny_tokenizer), eos_token="<|endoftext|>")
    path = json_lines(tmp_path / "in.jsonl", {"text": "the packs"}, {"question": "who?", "answer": "a horse"})
    plain = prepare([path], tmp_path / "plain")
    ids = prepare([path], tmp_path / "ids", tokenizer=tokenizer)
    assert [name for name, _ in written(ids)] == ["000000000.npy", "000000001.loss_mask.npy", "000000001.npy"]
    loader = BlockLoader({"text": DecodingSpec(name="text", tokenizer=tokenizer), "ids": DecodingSpec(name="ids")})
    [expected] = load_all(loader, "text", shard_at(plain.shards[0]))
    [found] = load_all(loader, "ids", shard_at(ids.shards[0]))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.loss_mask is not None
    assert expected.loss_mask is not None
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    assert (plain.ids, ids.ids) == (None, len(expected.tokens))


@pytest.mark.parametrize(
    ("name", "field", "samples"),
    [  # tau-bench has the outcome of a trajectory beside it
        ("glaive_toolcall_en_demo.json", None, 300),
        ("dummy_conversation.json", None, 500),
        ("mt_bench_question.jsonl", "turns", 80),
        ("tau_bench_gpt-4o-airline.json", None, 200),
        ("oasst_en_100_tree.jsonl", None, 626),
    ],
)
def test_real_conversations_prepare_and_load_without_fault(
    tmp_path: Path, tiny_tokenizer: Path, name: str, field: str | None, samples: int
) -> None:
    summary = prepare(
        [shared(f"data/chat/{name}")], tmp_path / "out", field=field, ignore_fields=["reward", "trial", "info"]
    )
    spec = DecodingSpec(name="chat", tokenizer=TokenizerSpec(file=str(tiny_tokenizer)))
    blocks = load_all(BlockLoader({"chat": spec}), "chat", shard_at(summary.shards[0]))
    assert sum(block.count for block in blocks) == summary.samples == samples
    assert not any(block.faults for block in blocks)
    trained = sum(int(block.loss_mask.sum()) for block in blocks if block.loss_mask is not None)
    assert (trained > 0) == (field is None)  # prompts without answers train nothing


def test_real_prompts_without_answers_ask_for_the_field(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"line 1: .*fields are question_id, category, turns; .*--field"):
        prepare([shared("data/chat/mt_bench_question.jsonl")], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "rows"),
    [("sft/dolly_hhrlhf_train_small.jsonl", 1000), ("sft/v1_identity_loss_weight.jsonl", 50), ("odd/blns.json", 515)],
)
def test_real_prompts_typed_content_and_hostile_strings_prepare(tmp_path: Path, name: str, rows: int) -> None:
    assert prepare([shared(f"data/{name}")], tmp_path / "out").samples == rows


@pytest.mark.parametrize("options", [(), ("--chat-template",)])
def test_a_models_folder_renders_the_same_in_prepare_and_in_serve(
    tmp_path: Path, tiny_tokenizer: Path, options: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(tiny_tokenizer.read_bytes())
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    rows = json_lines(tmp_path / "in.jsonl", {"messages": turns("a", "b", "c", "d")}, {"text": "e"})
    given = [*options, str(model / "chat_template.jinja")] if options else []
    for name, more in (("ids", ["--tokenizer", str(model), *given]), ("text", [])):
        result = CliRunner().invoke(app, ["prepare", str(rows), str(tmp_path / name), *more])
        assert result.exit_code == 0, result.output
    feed = {"tokenizer": "model", "contract": {"seq_length": 64, "global_batch_size": 1}}
    sources = {name: {"shards": f"{name}/*.tar"} for name in ("ids", "text")}
    plan = plan_stream(ServeConfig.model_validate(feed | {"sources": sources}), tmp_path)
    loader = BlockLoader(plan.decoding)
    [ids], [text] = (load_all(loader, name, shard_at(tmp_path / name / "data-000000.tar")) for name in ("ids", "text"))
    assert ids.tokens.tolist() == text.tokens.tolist()
    assert ids.loss_mask is not None
    assert text.loss_mask is not None
    assert ids.loss_mask.tolist() == text.loss_mask.tolist()
    assert 0 < ids.loss_mask.sum() < len(ids.tokens)
