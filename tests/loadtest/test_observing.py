"""What processes take is read from /proc, of a whole family; open files are allowed or refused with a number."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse_service.loadtest.observing import TICKS, Usage, observe, observe_all
from packhorse_service.loadtest.open_files import FILES_PER_RANK, allow_open_files, files_needed


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


LIMITED = """
import resource, sys
from packhorse import ConfigError
from packhorse_service.loadtest.open_files import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    allow_open_files(needed)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ConfigError as error:
    print(error)
"""


def limited(soft: int, hard: int, needed: int) -> str:
    words = [sys.executable, "-c", LIMITED, *map(str, (soft, hard, needed))]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    assert limited(256, 4096, 3000) == "4096\n"


def test_where_that_does_not_suffice_the_number_to_set_is_named() -> None:
    refused = limited(256, 512, files_needed(1024))
    assert "ulimit -Hn 7232" in refused
    assert "may open 512" in refused
    assert "--processes" in refused


def test_enough_files_are_no_reason_to_complain() -> None:
    allow_open_files(1)
    assert files_needed(2) - files_needed(1) == FILES_PER_RANK
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0
