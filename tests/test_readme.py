"""The README's configuration and training loop really run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packhorse_service.commands import app
from packhorse_service.prepare.prepare import prepare
from tests.harness import DEADLINE_S, running_server
from tests.service.shards_on_disk import save_tiny_tokenizer

README = Path(__file__).parents[1] / "README.md"


def block(language: str, number: int = 0) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) > number
    return str(found[number])


def test_the_first_60_lines_hold_the_configuration_the_loop_and_the_data_path() -> None:
    top = "\n".join(README.read_text(encoding="utf-8").splitlines()[:60])
    for part in (block("yaml"), block("python"), block("python", 1), "make demo", "make test", "═ZeroMQ═", "pipeline/"):
        assert part in top
    assert len(block("yaml").splitlines() + block("python").splitlines()) <= 13


def test_it_is_read_in_one_sitting() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_each_box_of_the_data_path_is_a_folder_or_a_module_of_that_name() -> None:
    picture = next(line for line in README.read_text(encoding="utf-8").splitlines() if "═ZeroMQ═" in line)
    service, client = (half.replace("▶", " ").split() for half in picture.split("═ZeroMQ═"))
    for root, boxes in (("service/packhorse_service", service), ("client/packhorse", client)):
        for box in (box.lower() for box in boxes):
            place = README.parent / root / box
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{root}/{box}"


def test_every_command_it_shows_exists_with_its_options() -> None:
    text = README.read_text(encoding="utf-8")
    shown = re.findall(r"^\$ packhorse (.*?)(?:\s+#.*)?$", text, re.MULTILINE) + re.findall(
        r"`packhorse (\w[^`]*)`", text
    )
    assert {"plan", "inspect", "check", "prepare", "serve"} <= {command.split()[0] for command in shown}
    for command in shown:
        name, *arguments = command.split()
        described = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [name, "--help"])
        assert described.exit_code == 0, command
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert re.search(rf"{option}\s", described.stdout), command


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """What ``feed.yaml`` names."""
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": f"horse {i} " * (i + 1)}) for i in range(40)))
    chats = [{"prompt": f"How many packs carries horse {i}?", "completion": "the packs " * i} for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    prepare([tmp_path / "docs.jsonl"], tmp_path, name="docs", max_shard_samples=20, progress=False)
    prepare([tmp_path / "chat.jsonl"], tmp_path, name="chat", progress=False)
    (tmp_path / "feed.yaml").write_text(block("yaml"))
    return tmp_path


COUNTED = "def train(tokens, labels, mask, *_): print(tokens.dtype, tokens.shape[0], int(mask.sum()))\n"


def start(script: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    command, environment = [sys.executable, "-c", script], {**os.environ, **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)


def test_the_first_loop_trains(data: Path) -> None:
    trained = start(COUNTED + block("python"), data)
    printed = trained.communicate(timeout=DEADLINE_S)[0].splitlines()
    assert trained.returncode == 0
    assert len(printed) > 0
    assert all(line.startswith("torch.int64 512 ") for line in printed)
    assert sum(int(line.split()[-1]) for line in printed) > 0


def test_the_feed_of_a_larger_job_reads_from_its_server(data: Path) -> None:
    shown = block("python", 1)
    given = {
        "data=16, tensor=2, context=2": "data=2",
        ', key_file="rank.key"': "",
        "...": "\n    print(len(list(feed)))",
    }
    config = data / "feed.yaml"
    config.write_text("listen: tcp://127.0.0.1:*\nlayout: {data: 2}\n" + block("yaml"))
    with running_server(config) as server:
        script = "import packhorse\n" + shown.replace("tcp://10.0.0.7:5555", server.endpoint)
        for what, here in given.items():
            assert what in script
            script = script.replace(what, here)
        ranks = [start(script, data, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
        printed = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
        assert server.process.wait(DEADLINE_S) == 0
    assert printed[0] == printed[1]
    assert int(printed[0]) > 0
