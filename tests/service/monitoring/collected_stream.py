"""What an collector sees of a real stream, in this process and without a socket."""

from __future__ import annotations

import tempfile
from pathlib import Path

from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.monitoring.collect import StatusCollector
from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.protocol.effects import Made, Make
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of
from packhorse_service.server.producer import Producer
from tests.harness import wait_until
from tests.service.corpus import inline_engine, random_lengths, write_source

__all__ = ["CollectedStream", "status_after"]


class CollectedStream:
    """A session and a producer that runs, joined by hand; two data-parallel readers."""

    def __init__(self, folder: Path) -> None:
        write_source(folder / "docs", random_lengths(1, 3, 60, longest=60))
        config = ServeConfig.model_validate(
            {
                "layout": {"data": 2},
                "contract": {"seq_length": 64, "global_batch_size": 4, "vocab_size": 10_000},
                "sources": {"docs": {"shards": "docs/*.tar"}},
            }
        )
        plan = plan_stream(config, folder)
        self.producer = Producer(plan, inline_engine(plan), lambda: None)
        self.session = StreamSession(
            StreamSpec(
                stream=plan.name,
                layout=plan.layout,
                contract=plan.contract,
                fingerprint=plan.fingerprint.digest,
                readers=readers_of(plan.layout),
            )
        )
        self.collector = StatusCollector("tcp://127.0.0.1:5555", [(self.session, self.producer)], 0.0)

    def make(self, steps: int) -> None:
        """So many steps, whatever the readers have taken."""
        if not self.producer.is_alive():
            self.producer.start()
        for _ in range(steps):
            self.session.buffer.in_progress = True
            self.producer.requests.put(Make(self.session.buffer.generation, self.session.buffer.next_step))
            wait_until(lambda: not self.producer.results.empty(), "a step")
            made = self.producer.results.get()
            assert isinstance(made, Made)
            self.session.made(made.generation, made.step, 0.0, made.snapshot_after)

    def close(self) -> None:
        self.producer.requests.put(None)
        if self.producer.is_alive():
            self.producer.join()


def status_after(steps: int, now: float = 10.0) -> ServerStatus:
    """The status of a server that has made so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        collected = CollectedStream(Path(folder))
        try:
            collected.make(steps)
            return collected.collector.collect(now, connections=0)
        finally:
            collected.close()
