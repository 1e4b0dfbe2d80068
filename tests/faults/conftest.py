"""What the fault tests share: seeds, a short and a long corpus, and processes that are gone afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.job import Job, job_of
from tests.faults.processes import Launcher, launching
from tests.faults.truth import Truth


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=int, default=0, help="repeat each random schedule with so many other seeds")
    parser.addoption("--fault-seed", type=int, default=0, help="the seed of random schedules, as a failure printed it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Random schedules run once, and as often again as a soak asks."""
    if "seed" in metafunc.fixturenames:
        # Options of this folder are not known where pytest was not started on it.
        first, more = (int(metafunc.config.getoption(name, default=0)) for name in ("--fault-seed", "--soak"))
        metafunc.parametrize("seed", range(first, first + 1 + more))


@pytest.fixture
def moments(seed: int) -> random.Random:
    """Chance, from a seed that is shown where a test fails."""
    print(f"pytest tests/faults --fault-seed {seed}")  # noqa: T201
    return random.Random(seed)


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """About 20 steps of two ranks."""
    return Truth.written(tmp_path_factory.mktemp("short"), 40)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """About 100 steps of two ranks."""
    return Truth.written(tmp_path_factory.mktemp("long"), 140)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path / "run") as launcher:
        yield launcher


@pytest.fixture
def job(short: Truth, launcher: Launcher) -> Iterator[Job]:
    """Two ranks of the short corpus, and their server."""
    with job_of(short, launcher) as job:
        yield job


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    path = tmp_path / "faults"
    path.mkdir()
    return path


@pytest.fixture
def slow_disk(short: Truth, tmp_path: Path, faults: Path) -> Iterator[Job]:
    """A job whose server reads through two loaders and a file system that fails or stalls on command."""
    with (
        launching(tmp_path / "run", FAULTS=str(faults)) as launcher,
        job_of(short, launcher, short.with_workers(2, "faulty")) as job,
    ):
        yield job
