"""The thread that runs a stream's pipeline, so that the server answers while a step is being made.

Requests and results are the session's effects and their answers; the two threads meet in queues.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packhorse.errors import ContractError, PackhorseError, ProtocolError
from packhorse_service.framing import FramedStep
from packhorse_service.loading.engine import Engine
from packhorse_service.mixing.source_counts import PipelineProgress, SourceCounts
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.protocol.effects import Made, Make, NotRestored, Restore, Restored
from packhorse_service.text.formatting import and_more

__all__ = ["Failed", "PipelineFailed", "Producer", "Result"]

log = logging.getLogger("packhorse.producer")


@dataclass(frozen=True, slots=True)
class Failed:
    generation: int
    error: PackhorseError


Result = Made | Restored | NotRestored | Failed


class PipelineFailed(PackhorseError):
    """The pipeline failed as no setting and no data explains; the log has the traceback."""


class Producer(threading.Thread):
    """Thread that runs a pipeline on request. Results are put in ``results``, and ``wake`` is called.

    Nothing is loaded before the first request: a stream that nobody reads costs nothing.
    """

    def __init__(self, plan: StreamPlan, engine: Engine, wake: Callable[[], None]) -> None:
        super().__init__(name=f"packhorse-producer-{plan.name}", daemon=True)
        self.requests: queue.SimpleQueue[Make | Restore | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.plan = plan
        self._engine = engine
        self._wake = wake
        self._pipeline: Pipeline | None = None
        self._steps_without_loss = 0
        self.busy = False  # with a request

    @property
    def workers(self) -> int:
        return self._engine.workers

    @property
    def restarts(self) -> int:
        return self._engine.restarts

    @property
    def progress(self) -> PipelineProgress | None:
        """Progress of the pipeline; ``None`` before the first request."""
        return None if self._pipeline is None else self._pipeline.progress

    @property
    def counts(self) -> Mapping[str, SourceCounts]:
        """Counts of what became of all that each source gave, by its name; none before the first request."""
        return {} if self._pipeline is None else self._pipeline.counts

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            result: Result
            self.busy = True
            try:
                result = self._carry_out(request)
            except PackhorseError as error:
                result = Failed(request.generation, error)
            except Exception as error:
                log.exception("the pipeline failed")
                result = Failed(request.generation, PipelineFailed(f"{type(error).__name__}: {error}"))
            self.busy = False
            self.results.put(result)
            self._wake()

    def _carry_out(self, request: Make | Restore) -> Result:
        pipeline = self._pipeline = self._pipeline or Pipeline(self.plan, self._engine)
        match request:
            case Make(generation, _):
                step = pipeline.next_step()
                if step is not None and not step.totals.loss_tokens:
                    self._warn_of_no_loss(step)
                ends_pass = step is None and self.plan.passes
                return Made(generation, step, pipeline.begin_pass() if ends_pass else b"")
            case Restore(generation, snapshot, step):
                try:
                    for notice in pipeline.restore(snapshot, step):
                        log.warning("resuming: %s", notice)
                except (ContractError, ProtocolError) as error:
                    return NotRestored(generation, str(error))
                return Restored(generation)

    def _warn_of_no_loss(self, step: FramedStep) -> None:
        """Warn of a step without a trained token: the first, the second, the fourth … as a stream may have many."""
        self._steps_without_loss += 1
        if self._steps_without_loss & (self._steps_without_loss - 1):
            return
        more = and_more(step.totals.microbatches - 1, "micro-batches")
        log.warning(
            "step %d of stream %r has no token that is trained on (such steps so far: %d): its first micro-batch holds "
            "%s%s; a loop must not divide by its step_loss_tokens, which is 0. Check the loss masks of these samples",
            step.step,
            self.plan.name,
            self._steps_without_loss,
            step.provenance(0, 0),
            f"; {more}" if step.totals.microbatches > 1 else "",
        )
