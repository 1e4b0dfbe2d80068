"""Blocks loaded ahead of their turn, in worker processes.

An engine has the shape of ``concurrent.futures``: ``submit(request) -> Future``. Loaders keep no state, so
a block whose worker died is submitted again. Determinism comes from the order in which blocks are asked
for here, never from when they arrive.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from packhorse.errors import PackhorseError, SourceError
from packhorse_service.loading.block import BlockRequest, TokenBlock

__all__ = ["BlockStore", "Engine", "InlineEngine", "Load", "ProcessEngine"]

Load = Callable[[BlockRequest], TokenBlock]

log = logging.getLogger("packhorse.loading")

SHUTDOWN_S = 1.0  # for all workers together
LOAD_ATTEMPTS = 3  # a block that kills its worker this often is the block's fault


class Engine(Protocol):
    """A place where blocks are loaded: here, in local processes, or on other machines."""

    @property
    def workers(self) -> int:
        """Number of loaders that work side by side, beside the calling thread."""

    @property
    def restarts(self) -> int:
        """Number of times that workers died, and were replaced."""

    def submit(self, request: BlockRequest) -> Future[TokenBlock]: ...

    def close(self) -> None: ...


class InlineEngine:
    """Engine in the calling thread: no process to start, nothing runs ahead."""

    workers = restarts = 0

    def __init__(self, load: Load) -> None:
        self._load = load

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        future: Future[TokenBlock] = Future()
        try:
            future.set_result(self._load(request))
        except PackhorseError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        return None


class _WorkerState:
    """State of a worker process: the loader, built once from its specification, or why it could not be built."""

    load: Load | None = None
    failure: PackhorseError | None = None


def _start_worker(make_load: Callable[[], Load]) -> None:
    # Ctrl-C reaches the whole process group; only the server decides when loading stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_the_server, daemon=True).start()
    try:
        _WorkerState.load = make_load()
    except PackhorseError as error:
        _WorkerState.failure = error  # told with the first block: a pool keeps its workers' last words to itself


def _exit_with_the_server() -> None:
    """Exit when the server has: killed, it cannot close its pool, whose workers would wait for work for ever."""
    server = multiprocessing.parent_process()
    if server is not None:
        server.join()
        os._exit(1)


def _load_in_worker(request: BlockRequest) -> TokenBlock:
    if _WorkerState.failure is not None:
        raise SourceError(
            f"a loader process cannot start: {_WorkerState.failure}; a server reads with the files that it was started "
            "with: put them back, or start it again"
        )
    if _WorkerState.load is None:
        raise RuntimeError("a loader process was used before it was started")
    return _WorkerState.load(request)


class _TrackedSpawnContext(SpawnContext):
    """Context in which a pool starts its workers. It remembers them: the pool does not say who they are."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*args, **kwargs)
        self.started.append(process)
        return process


class ProcessEngine:
    """Engine of spawned processes, in a pool. ``make_load`` is called once in each."""

    def __init__(self, workers: int, make_load: Callable[[], Load]) -> None:
        self.workers = workers
        self.restarts = 0
        self._processes = _TrackedSpawnContext()
        self._closed = False
        self._start = partial(
            ProcessPoolExecutor,
            max_workers=workers,
            mp_context=self._processes,
            initializer=_start_worker,
            initargs=(make_load,),
        )
        self._pool = self._start()

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        if self._closed:
            raise PackhorseError("the loaders were closed while blocks were being asked for")
        try:
            return self._pool.submit(_load_in_worker, request)
        except BrokenProcessPool:
            self.restarts += 1
            log.warning("a loader process died; all %d are started again", self.workers)
            self._pool.shutdown(wait=False)
            self._pool = self._start()
            return self._pool.submit(_load_in_worker, request)

    def close(self) -> None:
        """End the workers: those that are stuck in a read, or were stopped, by force."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        alive = [process for process in self._processes.started if process.is_alive()]
        for process in alive:
            process.join(SHUTDOWN_S / len(alive))
        for process in alive:
            process.kill()
            process.join()


class BlockStore:
    """Blocks by request, loaded ahead. What is ahead is bounded by what the caller asks for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ahead: dict[BlockRequest, Future[TokenBlock]] = {}
        self.waiting_for: BlockRequest | None = None  # the block that the caller needs now; for those who watch

    @property
    def loading(self) -> int:
        """Number of blocks that are being loaded, or wait for a worker; safe from any thread."""
        return sum(not future.done() for future in tuple(self._ahead.values()))

    def prefetch(self, requests: Iterable[BlockRequest]) -> None:
        """Begin to load blocks that will be asked for soon."""
        for request in requests:
            if request not in self._ahead:
                self.waiting_for = request  # an engine may load at once
                self._ahead[request] = self._engine.submit(request)
        self.waiting_for = None

    def get(self, request: BlockRequest) -> TokenBlock:
        """Return the block, waiting for it if need be. Raises ``SourceError`` as its loader did."""
        for _ in range(LOAD_ATTEMPTS):
            self.prefetch([request])
            self.waiting_for = request
            try:
                return self._ahead.pop(request).result()
            except BrokenProcessPool:
                continue  # its worker died, or a neighbour's did: load it again
            finally:
                self.waiting_for = None
        raise SourceError(
            f"shard {request.shard.name!r} of source {request.source!r}, block at byte {request.offset}: "
            f"the loader process died {LOAD_ATTEMPTS} times; look for its last words in the log, or lower block_bytes"
        )

    def forget(self) -> None:
        """Drop what was prefetched: the order starts again from elsewhere."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
