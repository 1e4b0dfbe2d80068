"""Who tells a process its rank, and who is asked first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

from packhorse.contract.layout import ParallelLayout
from packhorse.declare.rank_info import RankInfo, detect_rank
from packhorse.errors import ConfigError
from tests.harness import DEADLINE_S

FOUR = ParallelLayout(data=4)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A real process group of this one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_an_argument_wins_over_everything() -> None:
    assert detect_rank(FOUR, rank=3, environ={**TORCHRUN, **SLURM}) == RankInfo(3, 4, "arguments")
    assert detect_rank(FOUR, rank=3, world_size=8, environ=TORCHRUN) == RankInfo(3, 8, "arguments")


def test_a_world_size_given_alone_wins_too() -> None:
    """It is checked against the layout, so ignoring it would hide a job of the wrong size."""
    assert detect_rank(FOUR, world_size=8, environ=TORCHRUN)[:2] == (1, 8)
    assert detect_rank(ParallelLayout(), world_size=8, environ={})[:2] == (0, 8)


@pytest.mark.usefixtures("process_group")
def test_torch_distributed_wins_over_the_environment() -> None:
    assert detect_rank(FOUR, environ={**TORCHRUN, **SLURM}) == RankInfo(0, 1, "torch.distributed")
    assert detect_rank(FOUR, rank=3, environ=TORCHRUN) == RankInfo(3, 4, "arguments")


def test_a_process_group_that_is_not_initialised_says_nothing() -> None:
    assert not torch.distributed.is_initialized()
    assert detect_rank(FOUR, environ=TORCHRUN) == RankInfo(1, 4, "torchrun")


def test_torch_is_never_imported_to_ask() -> None:
    script = (
        "import sys\n"
        "from packhorse.declare.rank_info import detect_rank\n"
        "from packhorse.contract.layout import ParallelLayout\n"
        "print(tuple(detect_rank(ParallelLayout(data=4), environ={'RANK': '1', 'WORLD_SIZE': '4'})))\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout.splitlines() == ["(1, 4, 'torchrun')", "False"]


def test_torchrun_wins_over_slurm() -> None:
    assert detect_rank(FOUR, environ={**SLURM, **TORCHRUN}) == RankInfo(1, 4, "torchrun")
    assert detect_rank(FOUR, environ=SLURM) == RankInfo(2, 4, "Slurm")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_a_pair_of_variables_says_nothing(name: str) -> None:
    assert detect_rank(FOUR, environ={name: "1", **SLURM}) == RankInfo(2, 4, "Slurm")


def test_one_rank_needs_no_telling() -> None:
    assert detect_rank(ParallelLayout(), environ={}) == RankInfo(0, 1, "the layout")
    assert detect_rank(ParallelLayout(), environ=TORCHRUN) == RankInfo(1, 4, "torchrun")


def test_a_rank_that_nobody_tells_is_an_error_that_names_who_was_asked() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed.*RANK \(torchrun\).*SLURM_PROCID \(Slurm\).*rank="):
        detect_rank(FOUR, environ={})


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one'"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"SLURM_PROCID": "0x1", "SLURM_NTASKS": "4"}, "SLURM_PROCID='0x1'"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4(x2)"}, "SLURM_NTASKS='4(x2)'"),
    ],
)
def test_a_variable_that_is_no_number_is_refused_by_name_and_value(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        detect_rank(FOUR, environ=environ)
    assert named in str(refused.value)
