"""The same through a real server: what four fed ranks compute is what the samples of each step give one by one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse_service.processes import SERVE, Children
from tests.service.demo.rows_by_hand import CONTEXT, DATA, VOCABULARY, WIDTH, largest_difference, make_samples, unpacked
from tests.service.demo.running import eventually, run_ranks
from tests.service.shards_on_disk import ids_member, write_tar

RANKS = DATA * CONTEXT
SAMPLES = 58
FEED = f"""
listen: tcp://127.0.0.1:*
layout: {{data: {DATA}, context: {CONTEXT}}}
contract: {{seq_length: {WIDTH}, global_batch_size: 4, partition: zigzag, vocab_size: {VOCABULARY}}}
loading: {{workers: 0}}
keys: true
sources:
  made: {{shards: "made-*.tar"}}
"""


@dataclass(frozen=True)
class Fed:
    """What one rank saved of one step."""

    loss: float
    gradients: dict[str, torch.Tensor]
    keys: list[str]
    fillers: int


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[list[Fed]]:
    """For each step, what each rank saved."""
    folder = tmp_path_factory.mktemp("fed")
    files = []
    for number, sample in enumerate(make_samples(SAMPLES)):
        files.append((f"{number:03d}.npy", ids_member(sample.ids.tolist())))
        files.append((f"{number:03d}.loss_mask.npy", ids_member(sample.mask.tolist())))
    write_tar(folder / "made-0.tar", files[: len(files) // 4 * 2])
    write_tar(folder / "made-1.tar", files[len(files) // 4 * 2 :])
    (folder / "feed.yaml").write_text(FEED)
    endpoint = folder / "endpoint"
    serve = [sys.executable, "-c", SERVE, "serve", str(folder / "feed.yaml"), "--endpoint-file", str(endpoint)]
    with Children(folder) as children:
        children.start("server", serve)
        eventually(lambda: children.all_ended() or endpoint.exists())
        run_ranks(children, "tests.service.demo.rank_fed", [endpoint.read_text().strip(), str(folder)], RANKS)
    number_of_steps = len(list(folder.glob("*-0.pt")))
    return [[load(folder / f"{step}-{rank}.pt") for rank in range(RANKS)] for step in range(number_of_steps)]


def load(path: Path) -> Fed:
    saved: Any = torch.load(path, weights_only=True)
    return Fed(*saved)


def samples_of(step: list[Fed]) -> list[str]:
    """Keys of the samples in a step: context-parallel ranks hold slices of the same rows."""
    return [key for rank, fed in enumerate(step) if rank % CONTEXT == 0 for key in fed.keys]


def test_every_step_has_the_loss_and_gradients_of_its_samples(steps: list[list[Fed]]) -> None:
    everything = {f"{number:03d}": sample for number, sample in enumerate(make_samples(SAMPLES))}
    for step in steps:
        loss, expected = unpacked([everything[key] for key in samples_of(step)])
        for fed in step:
            assert fed.loss == pytest.approx(loss, abs=1e-9)
            assert largest_difference(fed.gradients, expected) < 1e-9


def test_every_sample_comes_once(steps: list[list[Fed]]) -> None:
    keys = [key for step in steps for key in samples_of(step)]
    assert sorted(keys) == [f"{number:03d}" for number in range(SAMPLES)]


def test_the_last_step_is_filled_and_no_other(steps: list[list[Fed]]) -> None:
    fillers = [sum(fed.fillers for fed in step) for step in steps]
    assert len(steps) >= 3
    assert fillers[-1] > 0
    assert not any(fillers[:-1])
