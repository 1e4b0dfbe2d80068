"""``packhorse.launch``: a server for this job alone, where one node runs all of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packhorse.errors import ConfigError, ServerFailed
from packhorse.feed import Feed
from packhorse.launching.job_place import job_place
from packhorse.launching.local_server import LocalServer
from packhorse.launching.runtime_folder import remove_abandoned, runtime_folder
from packhorse.protocol.client_session import State
from packhorse.transport.connection import Connection

__all__ = ["LaunchedFeed", "launch"]

BYE_S = 5.0  # how long a server takes to end by itself, at most
OTHERS_S = 60.0  # how long a rank that has ended waits for the others, before their server stops with it


class LaunchedFeed(Feed):
    """``Feed`` that ends the server with itself: closed, collected, or at the interpreter's exit.

    ``server_pid`` is the process id of that.
    """

    def __init__(self, server: LocalServer, ranks: int, **options: Any) -> None:
        super().__init__(server.endpoint, **options)
        self.server_pid = server.pid
        self._end_server = partial(_end, server, ranks, self._connection)
        server.tell_failure(_Failing(weakref.ref(self)))
        # Made after the feed's own, so it comes first at exit: the reader says BYE before its server ends.
        self._server_finalizer = weakref.finalize(self, _shut_both, self._finalizer, self._end_server)

    def _leave(self, *, in_order: bool) -> None:
        super()._leave(in_order=in_order)
        self._server_finalizer()


class _Failing:
    """Callback by which the loop of a feed hears that its server has failed, unless the feed is gone."""

    def __init__(self, feed: weakref.ref[LaunchedFeed]) -> None:
        self._feed = feed

    def __call__(self, how: str) -> None:
        feed = self._feed()
        if feed is not None:
            feed._connection.fail(ServerFailed(f"the server that launch() started has ended, {how}"))


def _shut_both(shut_feed: Callable[[], object], end_server: Callable[[], None]) -> None:
    shut_feed()
    end_server()


def _end(server: LocalServer, ranks: int, connection: Connection) -> None:
    """End the server; where this rank has left in order, it ends by itself once the others have."""
    said_bye = connection.leaving or connection.session.state is State.ENDED
    server.end((OTHERS_S if ranks > 1 else BYE_S) if said_bye else 0.0)


def launch(config: str | os.PathLike[str], *, monitor: str | None = None, **options: Any) -> Feed:
    """Start a packing server for this job on this node, and return the ``Feed`` of this rank.

        with packhorse.launch("feed.yaml", contract=BatchContract(seq_length=4096)) as feed:
            for micro_batch in feed: ...

    ``config`` is what ``packhorse serve`` takes; its ``listen`` and ``monitor`` are left out of account: the server
    listens on a socket that only this user can reach, and shows a status page only where ``monitor`` (``HOST:PORT``)
    says so. ``options`` are those of ``Feed``: ``contract``, ``layout``, ``arrays`` ….

    Under torchrun on one node the process of local rank 0 starts the server, and all ranks read from it. It ends with
    the feed, and when the process that started it has ended, whatever ended that. Its log lines are logged here, by
    the names that it logs them under (``packhorse.server`` …).

    Raises ``ConfigError`` where the server cannot start, with its own words, or the job has ranks on other nodes;
    ``StartTimeout`` where it does not listen within ``start_timeout``.
    """
    path = Path(config).absolute()
    if find_spec("packhorse_service") is None:
        raise ConfigError(
            "launch() starts the packing server, which is not installed; pip install 'packhorse[service]'"
        )
    place, folder = job_place(path), runtime_folder()
    socket = folder / place.socket
    if not place.starts:
        return Feed(f"ipc://{socket}", **options)
    remove_abandoned(folder)
    server = LocalServer(path, socket, monitor=monitor)
    try:
        server.await_listening(float(options.get("start_timeout", 540.0)))
        return LaunchedFeed(server, place.ranks, **options)
    except BaseException:
        server.end(wait_s=0.0)
        raise
