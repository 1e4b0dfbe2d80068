"""The benchmarks measure what they say: every way to feed ranks delivers all samples once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from rich.table import Table

from packhorse_service.loadtest.run.usage import family
from packhorse_service.text.sparkline import BARS
from tests.benchmarks import bare_path
from tests.benchmarks.__main__ import CHAPTERS, chapter
from tests.benchmarks.children import Child
from tests.benchmarks.consuming import Tally, looked_at
from tests.benchmarks.measuring import MemoryWatch, cpu_seconds, markdown, pss_bytes
from tests.benchmarks.memory import WIDTH, memory_line, slope
from tests.benchmarks.token_shards import TokenShards
from tests.benchmarks.whole_path import Row, Way, measure, whole_path_tables


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return TokenShards.written(tmp_path_factory.mktemp("shards"), 4, 40)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)])
def test_each_way_gives_data_parallel_ranks_every_sample_once_and_tensor_parallel_ones_all(
    shards: TokenShards, way: Way, data: int, tensor: int
) -> None:
    row = Row(way, data=data, tensor=tensor)
    measured = measure(row, shards)
    assert measured.exact
    assert measured.tokens == shards.tally.tokens
    assert measured.cpu_s > 0
    *_, targets = whole_path_tables({row: [measured]}, shards)
    absolute = 1 if tensor > 1 else 3
    assert targets.row_count == (absolute if way is Way.OURS else 0)  # ratios need the other ways too


def test_shards_are_the_same_in_every_run(shards: TokenShards, tmp_path: Path) -> None:
    again = TokenShards.written(tmp_path, 4, 40)
    assert again.tally == shards.tally
    assert [path.read_bytes() for path in again.paths] == [path.read_bytes() for path in shards.paths]
    assert TokenShards.written(tmp_path, 4, 40) == again
    assert TokenShards.written(tmp_path, 2, 40).tally.samples == 80


def test_the_limit_copies_every_sample_into_a_pack_that_has_room_for_it(shards: TokenShards) -> None:
    seen = Tally()
    for pack in bare_path.read_packs(shards.paths, 8192):
        assert len(pack.ids) == 4 * 8192
        assert pack.offsets[-1] <= 8192
        ids = memoryview(pack.ids).cast("i")
        seen += Tally(len(pack.offsets) - 1, pack.offsets[-1], sum(ids))
    assert seen == shards.tally


def test_the_limit_that_delivers_the_same_builds_arrays_that_agree_with_each_other(shards: TokenShards) -> None:
    for pack in bare_path.read_packs(shards.paths, 8192, targets=True):
        arrays = bare_path.full_arrays(bare_path.full_header(pack), bytes(pack.ids))
        assert len(arrays[0]) == 8192
        looked_at(0, *arrays)  # which asserts


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child, both waiting for the end of their input."""
    busy = "sum(range(10_000_000)); print(1, flush=True); input()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_is_measured_with_its_children(sleeper: subprocess.Popen[bytes]) -> None:
    parent, child = family(sleeper.pid)
    assert parent == sleeper.pid
    assert cpu_seconds(parent) >= cpu_seconds(child) > 0
    assert pss_bytes([parent]) > pss_bytes([child]) > 0


def test_memory_is_sampled_while_inside() -> None:
    with MemoryWatch(lambda: [os.getpid()], every_s=0.001) as watch:
        while len(watch.seen) < 3:
            pass
    assert watch.peak == max(size for _, size in watch.seen) > 1 << 20


def test_a_table_in_markdown_has_its_title_its_rows_and_its_caption() -> None:
    table = Table("name", "of it | all", title="What [bold]holds[/]", caption="as measured")
    table.add_row("a", "1")
    lines = markdown(table).splitlines()
    assert lines == [
        "### What holds",
        "",
        "| name | of it \\| all |",
        "| --- | --- |",
        "| a | 1 |",
        "",
        "as measured",
    ]


def test_memory_over_time_is_drawn_from_nothing_to_the_top_and_has_a_slope() -> None:
    seen = [(float(second), 100 + 10 * second) for second in range(100)]
    line = memory_line(seen, 1090)
    assert len(line) == WIDTH
    assert line[0] == BARS[1]
    assert line[-1] == BARS[-1]
    assert slope(seen) == pytest.approx(10)


@pytest.mark.parametrize("name", CHAPTERS)
def test_each_benchmark_of_the_one_command_gives_tables(name: str) -> None:
    module = import_module(f"tests.benchmarks.{name}")
    assert "quick" in signature(module.tables).parameters
    assert f"python -m tests.benchmarks.{name}" in str(module.__doc__)


def test_a_chapter_of_the_document_says_how_to_get_its_tables() -> None:
    table = Table("name", title="What holds")
    table.add_row("a")
    text = chapter("memory", "Memory over time.", [table])
    assert text.startswith("## Memory\n\n`python -m tests.benchmarks.memory`: Memory over time.\n")
    assert text.endswith("### What holds\n\n| name |\n| --- |\n| a |\n")


def test_who_waits_for_a_child_hears_at_once_that_what_it_needs_has_failed() -> None:
    waiting, failing = Child(["-c", "input()"]), Child(["-c", "raise SystemExit(3)"])
    try:
        with pytest.raises(RuntimeError, match="SystemExit"):
            waiting.result(needed=[failing])
    finally:
        waiting.end()
        failing.end()
