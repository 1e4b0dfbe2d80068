"""Rebuilding of micro-batches in their place in the queue: ahead of the loop, or by the loop where it comes first."""

from __future__ import annotations

from collections.abc import Callable

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import PackhorseError
from packhorse.protocol.effects import Deliver
from packhorse.transport.ready_queue import ReadyQueue

__all__ = ["Convert", "MicroBatchBuilder"]

Convert = Callable[[MicroBatch], MicroBatch]  # from numpy arrays to those that the loop asked for


class MicroBatchBuilder:
    """Builder of the arrays that the loop asked for. Whoever calls it holds the connection's lock.

    ``fail`` has the loop hear of an error, and returns what is raised for it.
    """

    def __init__(
        self, queue: ReadyQueue[MicroBatch], convert: Convert, fail: Callable[[Exception], PackhorseError]
    ) -> None:
        self._queue = queue
        self._convert = convert
        self._fail = fail

    def build(self, ahead: int, arrived: Deliver) -> MicroBatch:
        """Rebuild what arrived, and leave it ready in its place, ``ahead`` of the next.

        Raises nothing but ``PackhorseError``, which ends the thread too.
        """
        try:
            rebuilt = self._convert(self._queue.session.progress.rebuild(arrived))
        except Exception as error:  # whatever it is, the loop must hear of it
            raise self._fail(error) from error
        self._queue.entries[ahead] = rebuilt
        return rebuilt

    def build_next(self) -> bool:
        """Rebuild the first that nobody has; return whether there was one."""
        unbuilt = self._queue.first_unbuilt
        if unbuilt is not None:
            self.build(*unbuilt)
        return unbuilt is not None
