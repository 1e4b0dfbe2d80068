"""The training loops to copy really train, and go on from their checkpoints; under torchrun, on CPUs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.corpus import trained_targets, write_corpus
from tests.deploy.tools import DEPLOY, ROOT, missing, run
from tests.harness import running_server, write_config

RANKS = 2
TRAINERS = DEPLOY / "trainers"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("client", "service")),
}

pytestmark = pytest.mark.timeout(180)


def feed(folder: Path) -> Path:
    """A configuration for all loops, with its shards."""
    contract = {"seq_length": 256, "global_batch_size": 8, "vocab_size": 256}
    sources = {"instructions": {"shards": "instructions-*.tar", "over_length": "split"}}
    config = write_config(folder, contract=contract, layout={"data": RANKS}, sources=sources, loading={"workers": 0})
    write_corpus(config)
    return config


def train(config: Path, script: str, *arguments: str) -> str:
    """Run a loop on all ranks against a server of its own, which ends in order behind them; what rank 0 printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with running_server(config) as server:
        environment = {**ENVIRONMENT, "PACKHORSE_ENDPOINT": server.endpoint}
        folder = f"--checkpoints={config.parent / 'checkpoints'}"
        printed = run([*launch, TRAINERS / script, folder, *arguments], environment, timeout_s=120)
        assert server.process.wait(10) == 0
    return printed


def test_plain_pytorch_trains_every_target_once(tmp_path: Path) -> None:
    sizes = ("--seq-length=256", "--global-batch-size=8", "--vocabulary=256", "--learning-rate=0.01")
    printed = train(feed(tmp_path), "train_torch.py", *sizes)
    steps = re.findall(r"step (\d+): loss (\S+), (\d+) tokens", printed)
    assert sum(int(tokens) for _, _, tokens in steps) == trained_targets(tmp_path)
    assert float(steps[-1][1]) < float(steps[0][1]), "the loss falls"
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def test_transformers_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        missing("transformers")
    config = feed(tmp_path)
    sizes = ("--accumulation=4", "--vocabulary=256", "--save-every=3", "--learning-rate=0.01")
    train(config, "train_transformers.py", *sizes, "--steps=3")
    train(config, "train_transformers.py", *sizes, "--steps=6")
    state = trainer_state(tmp_path / "checkpoints" / "checkpoint-6")
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert state["stateful_callbacks"]["PackhorseFeed"]["attributes"]["feed"]["position"] == [6, 0]


def trainer_state(checkpoint: Path) -> Any:
    return json.loads((checkpoint / "trainer_state.json").read_text())


@pytest.mark.parametrize("script", sorted(TRAINERS.glob("*.py")), ids=lambda path: path.stem)
def test_a_loop_explains_its_arguments_and_its_limits(script: Path) -> None:
    text = script.read_text()
    assert re.search(r"(?i)not (?:run )?on a\s+GPU", text), "what was not tried says so"
    assert text.startswith('"""')
