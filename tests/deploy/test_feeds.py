"""Every example of a feed holds its contract, and serves what its comments promise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packhorse import BatchContract, MicroBatch, ParallelLayout, ReaderPolicy
from packhorse_service.commands import app
from packhorse_service.config.serve_config import load_config
from packhorse_service.protocol.stream_spec import readers_of
from tests.deploy.corpus import write_corpus
from tests.deploy.tools import DEPLOY
from tests.harness import reading, running_server

FEEDS = sorted((DEPLOY / "feeds").glob("*.yaml"))

Ranks = Mapping[int, tuple[MicroBatch, ...]]  # the micro-batches of one step


@pytest.fixture(params=FEEDS, ids=lambda path: path.stem)
def feed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the example, with shards beside it."""
    example: Path = request.param
    copy = tmp_path / example.name
    shutil.copy(example, copy)
    write_corpus(copy)
    return copy


def test_the_contract_holds_without_a_warning(feed: Path) -> None:
    checked = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(feed)])
    assert checked.exit_code == 0, checked.output
    assert "the contract holds" in checked.output
    assert "warn" not in checked.output


def test_every_reader_gets_a_step_of_the_shape_that_it_promises(feed: Path) -> None:
    contract = load_config(feed).contract
    feed.write_text(feed.read_text().replace(":5555", ":*"))
    ranks = first_step(feed)
    sizes = {len(step) for step in ranks.values()}
    assert len(sizes) == 1, "ranks differ in their number of micro-batches"
    assert sum(mb.num_loss_tokens for step in ranks.values() for mb in step) > 0
    PROMISES[feed.stem](contract, ranks)


def first_step(config: Path) -> Ranks:
    """The first step of every reader; then all leave."""
    described = load_config(config)
    layout = described.layout
    numbers = [layout.rank(at) for at in readers_of(layout, described.contract.readers or ReaderPolicy.ALL)]
    with running_server(config) as server, ThreadPoolExecutor(len(numbers)) as pool:
        steps = pool.map(lambda rank: read_step(server.endpoint, layout, rank), numbers)
        return dict(zip(numbers, steps, strict=True))


def read_step(endpoint: str, layout: ParallelLayout, rank: int) -> tuple[MicroBatch, ...]:
    with reading(endpoint, layout=layout, rank=rank) as feed:
        return next(feed.steps())


def whole_rows(contract: BatchContract, ranks: Ranks) -> None:
    assert {mb.tokens.shape for step in ranks.values() for mb in step} == {(contract.seq_length,)}


def an_eighth_of_each_row(contract: BatchContract, ranks: Ranks) -> None:
    length = contract.seq_length or 0
    assert {mb.tokens.shape for step in ranks.values() for mb in step} == {(length // 8,)}
    for step in zip(*(ranks[rank] for rank in range(8)), strict=True):
        assert {mb.width for mb in step} == {length}, "context-parallel ranks hold parts of one row"
        assert sum(mb.local_loss_tokens for mb in step) == step[0].num_loss_tokens


def rows_as_wide_as_needed(contract: BatchContract, ranks: Ranks) -> None:
    widths = {mb.width for step in ranks.values() for mb in step}
    assert len(widths) > 1
    assert all(width % 64 == 0 for width in widths)
    assert max(widths) <= (contract.micro_batch_size or 0) * (contract.seq_length or 0)


def full_rows_for_tensor_zero(contract: BatchContract, ranks: Ranks) -> None:
    assert sorted(ranks) == [0, 2, 4, 6], "the other tensor ranks do not read"
    rows = [mb for step in ranks.values() for mb in step]
    assert {mb.num_tokens for mb in rows} == {contract.seq_length}
    assert {mb.num_loss_tokens for mb in rows} == {contract.seq_length}


def one_shape(contract: BatchContract, ranks: Ranks) -> None:
    rows = [mb for step in ranks.values() for mb in step]
    assert len({(mb.tokens.shape, mb.cu_seqlens.shape, mb.cu_seqlens_padded.shape, mb.max_seqlen) for mb in rows}) == 1
    assert rows[0].cu_seqlens.shape == ((contract.max_segments or 0) + 2,)


PROMISES: dict[str, Callable[[BatchContract, Ranks], None]] = {
    "single-node-sft": whole_rows,
    "long-context-cp": an_eighth_of_each_row,
    "in-batch": rows_as_wide_as_needed,
    "pretraining-concat": full_rows_for_tensor_zero,
    "cuda-graphs": one_shape,
}
