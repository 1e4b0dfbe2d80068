"""What processes take is read from /proc, of a whole family; open files are allowed or refused with a number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse_service.loadtest.load_test import FILES_A_RANK
from packhorse_service.loadtest.run.usage import TICKS, Usage, observe, observe_all
from packhorse_service.server.rlimit import BESIDE_CONNECTIONS
from tests.harness import DEADLINE_S


def process(proc: Path, pid: int, parent: int, ticks: int, kib: int, files: int = 0) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    for number in range(files):
        (folder / "fd" / str(number)).touch()
    fields = ["S", str(parent), *["0"] * 9, str(ticks), str(ticks), "0", "0", *["0"] * 10]
    (folder / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")
    (folder / "smaps_rollup").write_text(f"00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss: {kib} kB\n")


def test_a_process_counts_with_its_descendants(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, ticks=50, kib=1024, files=3)
    process(tmp_path, 11, 10, ticks=5, kib=512, files=9)
    process(tmp_path, 12, 11, ticks=5, kib=512)
    process(tmp_path, 13, 1, ticks=500, kib=9999)
    (tmp_path / "self").mkdir()
    assert observe(10, tmp_path) == Usage(120 / TICKS, 2 << 20, 3)
    assert observe_all([11, 13], tmp_path) == Usage(1020 / TICKS, (1024 + 9999) << 10, 9)


def test_a_process_that_is_gone_or_cannot_be_seen_is_not_known(tmp_path: Path) -> None:
    assert observe(10, tmp_path) is None
    assert observe(10, tmp_path / "no proc at all") is None
    assert observe_all([10, 11], tmp_path) is None


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_it_sees_this_process() -> None:
    seen = observe(os.getpid())
    assert seen is not None
    assert seen.cpu_s > 0
    assert seen.memory_bytes > 1 << 20
    assert seen.open_files >= 3


def test_ranks_that_need_more_files_than_may_be_open_are_refused_with_the_number_to_set() -> None:
    script = (
        "import resource, sys; from packhorse_service.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512)); sys.argv[1:] = sys.argv[1].split(); main()"
    )
    words = [sys.executable, "-c", script, "loadtest --ranks 1024 --processes 1 --seq-length 64 --mean-length 8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert f"ulimit -n {1024 * FILES_A_RANK + BESIDE_CONNECTIONS}" in said
    assert "cannot be raised above 512" in said
    assert "--processes" in said
