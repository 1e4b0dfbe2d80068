"""The batch scripts, run by a real Slurm: server and ranks start, meet, train, and end within bounds."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.corpus import trained_targets, write_corpus
from tests.deploy.slurm import Cluster, Job, running_cluster
from tests.deploy.tools import DEPLOY, free_port
from tests.harness import write_config

TRAINER = str(DEPLOY / "trainers" / "train_torch.py")
SIZES = {"seq_length": 64, "global_batch_size": 4, "vocab_size": 256}
ARGUMENTS = ("--seq-length=64", "--global-batch-size=4", "--vocabulary=256", "--learning-rate=0.01")
WELL = ("COMPLETED", "0:0")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def feed(folder: Path, ranks: int, **settings: Any) -> Path:
    """A configuration for the trainer, with its shards."""
    source = {"shards": "instructions-*.tar", "over_length": "split", **settings.pop("source", {})}
    described = {"layout": {"data": ranks}, "contract": SIZES, "loading": {"workers": 0}, **settings}
    config = write_config(folder, sources={"instructions": source}, **described)
    write_corpus(config)
    return config


def beside_trainers(cluster: Cluster, folder: Path, *options: str) -> Job:
    """Server and four ranks on one node."""
    sizes = ("--nodes=1", "--cpus-per-task=4", *options)
    settings = {"FEED": "feed.yaml", "RANKS_PER_NODE": "4", "RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    return cluster.submit("beside-trainers.sbatch", folder, TRAINER, *ARGUMENTS, options=sizes, **settings)


def test_a_job_told_to_stop_saves_and_the_next_one_trains_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    feed(tmp_path, 4)
    first = beside_trainers(cluster, tmp_path)
    first.wait_step(2)
    cluster.run("scancel", "--batch", "--signal=TERM", str(first.number))
    assert first.wait_end() == WELL, first.log
    assert "stopped by SIGTERM" in first.log
    second = beside_trainers(cluster, tmp_path)
    assert second.wait_end() == WELL, second.log
    assert "the stream has ended" in second.log
    steps = first.steps + second.steps
    assert [number for number, _ in steps] == list(range(len(steps)))
    assert sum(tokens for _, tokens in steps) == trained_targets(tmp_path), "no target twice, and none left out"


def test_the_time_limit_is_announced_early_enough_to_save(cluster: Cluster, tmp_path: Path) -> None:
    feed(tmp_path, 4, source={"epochs": "endless"})
    job = beside_trainers(cluster, tmp_path)
    job.wait_step(2)
    cluster.run("scontrol", "update", f"jobid={job.number}", "timelimit=2")  # the script's --signal is at 120 s
    assert job.wait_end() == WELL, job.log
    assert f"with a checkpoint behind step {len(job.steps) - 1}" in job.log
    assert (tmp_path / "checkpoints" / "last.pt").exists()


def test_a_job_of_two_components_makes_keys_and_meets_over_them(cluster: Cluster, tmp_path: Path) -> None:
    feed(tmp_path, 2, curve={"key_file": "keys/server.key", "clients": "keys/clients.toml"})
    sizes = ("--nodes=1", "--cpus-per-task=2", "--mem=1G", ":", "--nodes=1", "--cpus-per-task=4")
    # Both nodes are this machine, so loopback is a network that they share.
    here = {"PACKHORSE_LISTEN": "tcp://127.0.0.1:*", "RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    settings = {"FEED": "feed.yaml", "RANKS_PER_NODE": "2", **here}
    job = cluster.submit("heterogeneous.sbatch", tmp_path, TRAINER, *ARGUMENTS, options=sizes, **settings)
    job.wait_step(2)
    cluster.run("scancel", "--batch", "--signal=TERM", str(job.number))
    assert job.wait_end() == WELL, job.log
    assert "stopped by SIGTERM" in job.log
    assert stat.S_IMODE((tmp_path / "keys" / "trainers.key").stat().st_mode) == 0o600


def test_a_server_that_is_refused_ends_the_job_at_once_with_its_words(cluster: Cluster, tmp_path: Path) -> None:
    feed(tmp_path, 4, contract={**SIZES, "global_batch_size": 5})
    job = beside_trainers(cluster, tmp_path)
    assert job.wait_end() == ("FAILED", "1:0"), job.log
    assert "the server has ended before it listened" in job.log
    assert "GBS_DIVIDES" in job.log
