"""``packhorse inspect``: what it says of a step is what the ranks of that step are sent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from typer.testing import CliRunner, Result

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse_service.commands import app
from packhorse_service.config.serve_config import load_config
from packhorse_service.framing import FramedStep, ViewKey
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.preview.inspected_step import InspectedStep, PlacedMicroBatch, PlacedSample, select
from tests.service.corpus import random_lengths, read_shards, run_plan, write_source
from tests.service.preview.test_plan_from_config import MODES, ONE_RUN


def inspect(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["inspect", *map(str, arguments)])


def feed(folder: Path, *, longest: int = 150, data: int = 2, **contract: Any) -> Path:
    """A configuration of two sources with samples longer than a row."""
    write_source(folder / "docs", random_lengths(1, 3, 12, longest=longest))
    write_source(folder / "chat", random_lengths(2, 2, 12, longest=60), first=20_000)
    content = {
        "layout": {"data": data},
        "contract": {"seq_length": 64, "global_batch_size": 4, "vocab_size": 60_000, **contract},
        "loading": {"workers": 0},
        "sources": {
            "docs": {"shards": "docs/*.tar", "over_length": "split"},
            "chat": {"shards": "chat/*.tar", "over_length": "split"},
        },
    }
    path = folder / "feed.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def inspected(*arguments: str | Path) -> dict[str, Any]:
    done = inspect(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def served(path: Path) -> list[list[list[MicroBatch]]]:
    """Micro-batches by step, rank and index."""
    plan = plan_stream(load_config(path), path.parent)

    def of_rank(step: FramedStep, rank: int) -> list[MicroBatch]:
        views = step.views_of(ViewKey(rank, 0))
        return [Rebuilder(plan.contract, plan.layout, 0).rebuild(view.body, memoryview(view.payload)) for view in views]

    return [[of_rank(step, rank) for rank in range(plan.layout.data)] for step in run_plan(plan)]


@pytest.mark.parametrize("mode", [*MODES.values(), ONE_RUN], ids=[*MODES, "one_run"])
def test_every_sample_sits_where_it_says(tmp_path: Path, mode: dict[str, Any]) -> None:
    """In the first and the last step, against the rows that are sent and the shards as another reader finds them."""
    path = feed(tmp_path, **mode)
    stored = {
        (source, sample.shard, sample.key): sample.ids
        for source in ("docs", "chat")
        for sample in read_shards(sorted((tmp_path / source).glob("*.tar")))
    }
    steps = served(path)
    for step in (0, len(steps) - 1):
        for placed in inspected(path, "--step", str(step))["micro_batches"]:
            batch = steps[step][placed["rank"]][placed["index"]]
            row = batch.tokens.reshape(placed["rows"], placed["width"])
            assert placed["filler"] == batch.filler
            assert sum(sample["slots"] for sample in placed["samples"]) == batch.num_tokens
            for sample in placed["samples"]:
                ids = stored[sample["source"], sample["shard"], sample["key"]]
                assert sample["ids"] == len(ids)
                at = row[sample["row"], sample["start"] : sample["start"] + sample["slots"]]
                assert at.tolist() == ids[sample["begin"] : sample["begin"] + sample["slots"]]
                assert sample["begin"] + sample["slots"] <= sample["end"] <= sample["ids"]


@pytest.mark.parametrize("tail", ["own_segment", "extend_last"])
def test_physical_lengths_are_those_of_the_offsets(tmp_path: Path, tail: str) -> None:
    path = feed(tmp_path, segment_multiple=8, tail_padding=tail)
    (first, *_), *_ = served(path)[0]
    placed = inspected(path, "--step", "0", "--rank", "0")["micro_batches"][0]["samples"]
    assert [sample["start"] for sample in placed] == first.cu_seqlens_padded[: len(placed)].tolist()
    ends = [sample["start"] + sample["physical"] for sample in placed]
    assert ends == first.cu_seqlens_padded[1 : len(placed) + 1].tolist()


def test_every_micro_batch_of_a_step_is_dealt_once_and_the_rest_are_fillers(tmp_path: Path) -> None:
    path = feed(tmp_path)
    last = len(served(path)) - 1
    micro_batches = inspected(path, "--step", str(last))["micro_batches"]
    numbers = Counter(each["number"] for each in micro_batches)
    assert numbers == Counter(range(4))
    real = [each["number"] for each in micro_batches if not each["filler"]]
    assert sorted(real) == list(range(len(real)))


def test_a_rank_alone_is_the_same_as_among_others(tmp_path: Path) -> None:
    path = feed(tmp_path)
    both = inspected(path, "--step", "1")["micro_batches"]
    alone = inspected(path, "--step", "1", "--rank", "1")["micro_batches"]
    assert alone == [each for each in both if each["rank"] == 1]


def test_a_step_behind_the_end_names_the_last_one(tmp_path: Path) -> None:
    path = feed(tmp_path)
    last = len(served(path)) - 1
    done = inspect(path, "--step", "999")
    assert (done.exit_code, f"--step 999: the last step of the stream is {last}" in done.stderr) == (1, True)
    assert inspect(path, "--step", str(last)).exit_code == 0


def test_a_rank_that_is_not_there_is_named_with_the_last(tmp_path: Path) -> None:
    done = inspect(feed(tmp_path), "--step", "0", "--rank", "2")
    assert (done.exit_code, "--rank 2: the last data-parallel rank of this layout is 1" in done.stderr) == (1, True)


# What is shown -------------------------------------------------------------------------------------------


def test_the_picture_is_a_png_with_the_colours_of_both_sources(tmp_path: Path) -> None:
    done = inspect(feed(tmp_path), "--step", "0", "--out", tmp_path / "step.png")
    assert done.exit_code == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = (imread(tmp_path / "step.png")[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}
    assert {(0xCF, 0x74, 0x20), (0x2F, 0x6F, 0x9F)} <= colours


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    done = inspect(feed(tmp_path), "--step", "0", "--out", tmp_path / "no" / "folder.png")
    assert (done.exit_code, "folder.png' cannot be written: No such file or directory" in done.stderr) == (1, True)


def wide_step(ranks: int, each: int, rows: int = 1) -> InspectedStep:
    sample = PlacedSample("docs", "docs.tar", "0", 0, 5, 5, 0, 0, 4, 4)
    placed = tuple(
        PlacedMicroBatch(rank, index, rank * each + index, filler=False, rows=rows, width=8, samples=(sample,))
        for rank in range(ranks)
        for index in range(each)
    )
    return InspectedStep(0, "online", ranks, ("docs",), placed)


@pytest.mark.parametrize(
    ("step", "rank", "shown", "said"),
    [
        (wide_step(4, 4), None, 16, ""),
        (wide_step(64, 4), None, 48, "Only ranks 0 to 11 of 64: --rank R shows another."),
        (wide_step(64, 4), 63, 4, ""),
        (wide_step(64, 40), None, 40, "Only rank 0 of 64: --rank R shows another."),
        (wide_step(2, 100), 1, 48, "Only micro-batches 0 to 47 of the 100 of rank 1: --json has all."),
        (wide_step(64, 1, rows=16), None, 3, "Only ranks 0 to 2 of 64: --rank R shows another."),
    ],
)  # fmt: skip
def test_what_is_too_much_for_one_picture_is_left_out_and_said(
    step: InspectedStep, rank: int | None, shown: int, said: str
) -> None:
    selection = select(step, rank)
    assert (len(selection.micro_batches), selection.left_out) == (shown, said)
