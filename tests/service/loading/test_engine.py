"""Blocks arrive whole whatever happens to the processes that load them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.engine import LOAD_ATTEMPTS, BlockStore, InlineEngine, Load, ProcessEngine
from packhorse_service.sources.shards import Shard
from tests.harness import wait_until
from tests.service.corpus import make_block


@pytest.fixture
def workers_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes get this process's search path; pytest's own import mode leaves it alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def request_for(number: int) -> BlockRequest:
    return BlockRequest("docs", Shard(f"part-{number}.tar", f"/data/part-{number}.tar", 1000), 512 * number, 7)


def load(request: BlockRequest) -> TokenBlock:
    """A block that tells its request."""
    ids = [request.offset, request.first_sample, request.shard.size]
    return make_block([ids], keys=[request.shard.name], loss_mask=[[0, 1, 1]], next_offset=request.offset + 512)


def make_load() -> Load:
    return load


def make_load_that_dies_once(markers: Path) -> Load:
    """Each block kills its process the first time it is loaded, and leaves a marker."""

    def loads(request: BlockRequest) -> TokenBlock:
        marker = markers / request.shard.name
        if not marker.exists():
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return load(request)

    return loads


def make_load_that_dies_on(name: str, markers: Path) -> Load:
    def loads(request: BlockRequest) -> TokenBlock:
        if request.shard.name == name:
            (markers / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return load(request)

    return loads


def make_load_that_finds_fault() -> Load:
    def loads(request: BlockRequest) -> TokenBlock:
        raise SourceError(f"shard {request.shard.name!r}, member 'x.npy' at byte 512: it is cut short — ü")

    return loads


def make_load_that_cannot_be_made() -> Load:
    raise ConfigError("tokenizer.file='t.json' has digest 12, expected 34")


@pytest.fixture
def engines() -> Iterator[list[ProcessEngine]]:
    """Engines of a test; all are closed behind it."""
    started: list[ProcessEngine] = []
    yield started
    for engine in started:
        engine.close()


def contents(block: TokenBlock) -> list[object]:
    """All that a block holds, as values that compare."""
    arrays = (block.tokens, block.offsets, block.loss_mask, block.labels)
    listed = [None if array is None else (array.dtype, array.tolist()) for array in arrays]
    return [*listed, block.keys, block.next_offset, block.faults]


# Processes -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("workers_can_import_tests")
class TestProcesses:
    def test_a_block_whose_worker_is_killed_is_loaded_again(self, engines: list[ProcessEngine], tmp_path: Path) -> None:
        engine = ProcessEngine(1, partial(make_load_that_dies_once, tmp_path))
        engines.append(engine)
        block = BlockStore(engine).get(request_for(1))
        killed = int((tmp_path / "part-1.tar").read_text())
        assert killed != os.getpid()
        assert contents(block) == contents(load(request_for(1)))

    def test_blocks_announced_behind_a_killed_worker_arrive_in_the_order_asked_for(
        self, engines: list[ProcessEngine], tmp_path: Path
    ) -> None:
        engine = ProcessEngine(1, partial(make_load_that_dies_once, tmp_path))
        engines.append(engine)
        store = BlockStore(engine)
        (tmp_path / "part-2.tar").touch()  # this one and the next do not kill
        (tmp_path / "part-3.tar").touch()
        store.prefetch(map(request_for, (1, 2, 3)))
        assert [store.get(request_for(i)).keys for i in (1, 2, 3)] == [(f"part-{i}.tar",) for i in (1, 2, 3)]

    def test_a_block_that_always_kills_its_worker_is_an_error_that_names_it(
        self, engines: list[ProcessEngine], tmp_path: Path
    ) -> None:
        engine = ProcessEngine(1, partial(make_load_that_dies_on, "part-1.tar", tmp_path))
        engines.append(engine)
        store = BlockStore(engine)
        with pytest.raises(SourceError, match=r"'part-1\.tar' of source 'docs', block at byte 512: .*died 3 times"):
            store.get(request_for(1))
        assert len(list(tmp_path.iterdir())) == LOAD_ATTEMPTS
        assert store.get(request_for(2)).keys == ("part-2.tar",)  # others still load

    def test_a_source_error_arrives_whole(self, engines: list[ProcessEngine]) -> None:
        engine = ProcessEngine(1, make_load_that_finds_fault)
        engines.append(engine)
        with pytest.raises(SourceError) as error:
            BlockStore(engine).get(request_for(1))
        assert type(error.value) is SourceError
        assert str(error.value) == "shard 'part-1.tar', member 'x.npy' at byte 512: it is cut short — ü"

    def test_a_loader_that_cannot_start_says_why_with_the_block_asked_for(self, engines: list[ProcessEngine]) -> None:
        engine = ProcessEngine(1, make_load_that_cannot_be_made)
        engines.append(engine)
        with pytest.raises(SourceError, match=r"cannot start: tokenizer\.file='t\.json' has digest 12.*put them back"):
            BlockStore(engine).get(request_for(1))

    def test_a_closed_engine_leaves_no_process_behind(self) -> None:
        before = set(multiprocessing.active_children())
        engine = ProcessEngine(2, make_load)
        store = BlockStore(engine)
        requests = [request_for(i) for i in range(20)]
        store.prefetch(requests)
        assert contents(store.get(requests[0])) == contents(load(requests[0]))
        started = set(multiprocessing.active_children()) - before
        assert started
        engine.close()  # with blocks announced that nobody asked for
        # The pool's own thread reaps them too: whoever comes second has to be told.
        wait_until(lambda: not any(process.is_alive() for process in started), "the end of the loaders")
        wait_until(lambda: set(multiprocessing.active_children()) <= before, "the list of processes to be right")

    def test_an_engine_that_was_broken_leaves_no_process_behind(self, tmp_path: Path) -> None:
        before = set(multiprocessing.active_children())
        engine = ProcessEngine(2, partial(make_load_that_dies_once, tmp_path))
        BlockStore(engine).get(request_for(1))
        engine.close()
        # The broken pool's own thread may be reaping one at this moment.
        wait_until(lambda: set(multiprocessing.active_children()) <= before, "the end of all workers")


# In this process -------------------------------------------------------------------------------------


class CountingEngine:
    """Keeps every future it gives, all done."""

    workers = restarts = 0

    def __init__(self) -> None:
        self.submitted: list[BlockRequest] = []
        self.futures: list[Future[TokenBlock]] = []

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        self.submitted.append(request)
        future: Future[TokenBlock] = Future()
        future.set_result(load(request))
        self.futures.append(future)
        return future

    def close(self) -> None:
        return None


class LazyEngine(CountingEngine):
    """Loads nothing: its futures stay open."""

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        self.submitted.append(request)
        self.futures.append(Future())
        return self.futures[-1]


def test_the_inline_engine_loads_at_once() -> None:
    future = InlineEngine(load).submit(request_for(3))
    assert future.done()
    assert contents(future.result()) == contents(load(request_for(3)))


def test_the_inline_engine_keeps_a_source_error_for_the_one_who_asks() -> None:
    engine = InlineEngine(make_load_that_finds_fault())
    store = BlockStore(engine)
    store.prefetch([request_for(1)])  # loading ahead of its turn must not stop the stream early
    with pytest.raises(SourceError, match="cut short"):
        store.get(request_for(1))


def test_what_was_announced_is_loaded_once() -> None:
    engine = CountingEngine()
    store = BlockStore(engine)
    store.prefetch([request_for(1), request_for(2)])
    store.prefetch([request_for(2), request_for(1)])
    assert store.get(request_for(1)).keys == ("part-1.tar",)
    assert engine.submitted == [request_for(1), request_for(2)]


def test_nothing_is_loaded_but_what_was_announced_or_asked_for() -> None:
    engine = CountingEngine()
    store = BlockStore(engine)
    store.prefetch([request_for(1)])
    store.get(request_for(2))
    assert engine.submitted == [request_for(1), request_for(2)]


def test_a_block_is_not_kept_once_it_was_given() -> None:
    engine = CountingEngine()
    store = BlockStore(engine)
    store.get(request_for(1))
    store.get(request_for(1))
    assert engine.submitted == [request_for(1)] * 2


def test_what_is_forgotten_is_cancelled_and_loaded_afresh() -> None:
    lazy = LazyEngine()
    store = BlockStore(lazy)
    store.prefetch([request_for(1), request_for(2)])
    store.forget()
    assert all(future.cancelled() for future in lazy.futures)
    store.prefetch([request_for(1)])
    assert lazy.submitted == [request_for(1), request_for(2), request_for(1)]
