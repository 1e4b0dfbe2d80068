"""When a server with several streams leaves; its clock is the test's."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import packhorse_service.server.server
from packhorse import Feed
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.pipeline.all_streams import plan_streams
from packhorse_service.protocol.readers import Phase
from packhorse_service.server.server import END_GRACE_S, Ending, Server
from tests.harness import DEADLINE_S, wait_until
from tests.service.corpus import inline_engine, random_lengths, write_source


class Clock:
    """The real one, and what the test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ours = Clock()
    monkeypatch.setattr(packhorse_service.server.server, "time", SimpleNamespace(monotonic=ours))
    return ours


def test_an_evaluation_behind_the_end_of_training_keeps_the_server_until_it_is_heard_no_more(
    tmp_path: Path, clock: Clock
) -> None:
    write_source(tmp_path / "docs", random_lengths(1, 2, 20, longest=60))
    config = ServeConfig.model_validate(
        {
            "contract": {"seq_length": 64, "global_batch_size": 2, "vocab_size": 10_000},
            "sources": {"docs": {"shards": "docs/*.tar"}},
            "streams": {"validation": {"sources": {"docs": {"shards": "docs/*.tar"}}}},
        }
    )
    streams = [(plan, inline_engine(plan)) for plan in plan_streams(config, tmp_path)]
    server = Server(streams, f"ipc://{tmp_path}/server")
    train, validation = (stream.session for stream in server._streams.values())
    endings: list[Ending] = []
    serving = threading.Thread(target=lambda: endings.append(server.serve()))
    serving.start()
    with Feed(server.endpoint, arrays="numpy", start_timeout=DEADLINE_S, stall_timeout=DEADLINE_S) as feed:
        evaluation = feed.stream("validation")
        trained = len(list(feed))
        begun = len(list(itertools.islice(evaluation, 1)))
        wait_until(lambda: train.phase is Phase.ENDED, "the end of training")
        for _ in range(3):
            clock.added_s += 0.7 * END_GRACE_S
            since = clock()
            wait_until(lambda since=since: validation.heard_s >= since, "a keep-alive of the evaluation")  # type: ignore[misc]
        assert serving.is_alive()
        assert begun + len(list(evaluation)) == trained, "the data is the same"
        wait_until(lambda: validation.readers.low_watermark == evaluation.position, "its last acknowledgement")
        evaluation.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        clock.added_s += 1.1 * END_GRACE_S
        serving.join(DEADLINE_S)
    assert endings == [Ending.SILENT], "the reader of the first stream has not said BYE"
