"""The training loops to copy really train, and go on from their checkpoints; under torchrun, on CPUs."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.corpus import trained_targets, write_corpus
from tests.deploy.tools import DEPLOY, ROOT, missing, run
from tests.harness import DEADLINE_S, running_server, write_config

RANKS = 2
TRAINERS = DEPLOY / "trainers"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("client", "service", "")),
}

pytestmark = pytest.mark.timeout(180)


def feed(folder: Path, ranks: int = RANKS, **contract: str) -> Path:
    """A configuration for all loops, with its shards."""
    sizes = {"seq_length": 256, "global_batch_size": 8, "vocab_size": 256, **contract}
    sources = {"instructions": {"shards": "instructions-*.tar", "over_length": "split"}}
    config = write_config(folder, contract=sizes, layout={"data": ranks}, sources=sources, loading={"workers": 0})
    write_corpus(config)
    return config


def train(config: Path, *script: str, ranks: int = RANKS) -> str:
    """Run a loop on all ranks against a server of its own, which ends in order behind them; what they printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with running_server(config) as server:
        environment = {**ENVIRONMENT, "PACKHORSE_ENDPOINT": server.endpoint}
        folder = f"--checkpoints={config.parent / 'checkpoints'}"
        printed = run([*launch, *script, folder], environment, timeout_s=120)
        assert server.process.wait(DEADLINE_S) == 0
    return printed


def steps_of(printed: str) -> list[tuple[str, str, str]]:
    """(number, loss, trained tokens) of each step."""
    return re.findall(r"step (\d+): loss (\S+), (\d+) tokens", printed)


def needs(module: str) -> None:
    """What ``make models`` installs."""
    if find_spec(module.partition(".")[0]) is None:
        missing(module)


def test_plain_pytorch_trains_every_target_once(tmp_path: Path) -> None:
    sizes = ("--seq-length=256", "--global-batch-size=8", "--vocabulary=256", "--learning-rate=0.01")
    printed = train(feed(tmp_path), str(TRAINERS / "train_torch.py"), *sizes)
    steps = steps_of(printed)
    assert sum(int(tokens) for _, _, tokens in steps) == trained_targets(tmp_path)
    assert float(steps[-1][1]) < float(steps[0][1]), "the loss falls"
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def test_transformers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    needs("transformers")
    config = feed(tmp_path)
    sizes = ("--accumulation=4", "--vocabulary=256", "--save-every=3", "--learning-rate=0.01")
    for steps in (3, 6):
        train(config, str(TRAINERS / "train_transformers.py"), *sizes, f"--steps={steps}")
    state = trainer_state(tmp_path / "checkpoints" / "checkpoint-6")
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert state["stateful_callbacks"]["PackhorseFeed"]["attributes"]["feed"]["position"] == [6, 0]


def test_megatron_core_goes_on_from_its_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    needs("megatron.core")
    config = feed(tmp_path, ranks=1, partition="zigzag", loss_reduction="per_token")
    model = ("--vocabulary=256", "--layers=1", "--hidden-size=32", "--heads=2", "--learning-rate=0.01")
    sizes = ("--seq-length=256", "--global-batch-size=8", "--save-every=8", "--no-distributed-optimizer", *model)
    whole = steps_of(train(config, "-m", "tests.deploy.megatron_on_a_cpu", *sizes, ranks=1))
    assert sum(int(tokens) for _, _, tokens in whole) == trained_targets(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step-000008\n")
    resumed = steps_of(train(config, "-m", "tests.deploy.megatron_on_a_cpu", *sizes, ranks=1))
    assert resumed == whole[8:]


def trainer_state(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "trainer_state.json").read_text())


@pytest.mark.parametrize("script", sorted(TRAINERS.glob("*.py")), ids=lambda path: path.stem)
def test_a_loop_explains_its_arguments_and_its_limits(script: Path) -> None:
    text = script.read_text()
    assert re.search(r"(?i)not (?:run )?on a\s+GPU", text), "what was not tried says so"
    assert text.startswith('"""')
