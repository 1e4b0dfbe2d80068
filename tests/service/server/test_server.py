"""When a server leaves, and whose fault it says it is; its clock is the test's."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from packhorse import ContractError, Feed, PackhorseError, SourceError
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.pipeline.all_streams import plan_streams
from packhorse_service.protocol.attempt import Phase
from packhorse_service.server.lifetime import END_GRACE_S, Ending
from packhorse_service.server.producer import PipelineFailed
from packhorse_service.server.served_stream import with_text
from packhorse_service.server.server import Server
from packhorse_service.sources.sample import BadSample
from tests.harness import DEADLINE_S, wait_until
from tests.service.corpus import inline_engine, random_lengths, write_source


class Clock:
    """The real one, and what the test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added_s


def test_an_evaluation_behind_the_end_of_training_keeps_the_server_until_it_is_heard_no_more(tmp_path: Path) -> None:
    clock = Clock()
    write_source(tmp_path / "docs", random_lengths(1, 2, 20, longest=60))
    config = ServeConfig.model_validate(
        {
            "contract": {"seq_length": 64, "global_batch_size": 2, "vocab_size": 10_000},
            "sources": {"docs": {"shards": "docs/*.tar"}},
            "streams": {"validation": {"sources": {"docs": {"shards": "docs/*.tar"}}}},
        }
    )
    streams = [(plan, inline_engine(plan)) for plan in plan_streams(config, tmp_path)]
    server = Server(streams, f"ipc://{tmp_path}/server", clock=clock)
    train, validation = (stream.session for stream in server.streams)
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
        wait_until(lambda: validation.attempt.readers.low_watermark == evaluation.position, "its last acknowledgement")
        evaluation.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        clock.added_s += 1.1 * END_GRACE_S
        serving.join(DEADLINE_S)
    assert endings == [Ending.SILENT], "the reader of the first stream has not said BYE"


# Whose fault it is -----------------------------------------------------------------------------------------


class Told:
    """A hook that notes the moments of the loop that it is told of."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def started(self) -> None:
        self.moments.append("started")

    def on_turn(self, now: float, connections: int) -> None:
        self.moments.append("turned")
        assert (now > 0, connections) == (True, 0)

    def stopping(self) -> None:
        self.moments.append("stopping")


def a_server(folder: Path) -> Server:
    write_source(folder / "docs", random_lengths(1, 1, 20, longest=60))
    config = ServeConfig.model_validate(
        {
            "contract": {"seq_length": 64, "global_batch_size": 2, "vocab_size": 10_000},
            "sources": {"docs": {"shards": "docs/*.tar"}},
        }
    )
    return Server([(plan, inline_engine(plan)) for plan in plan_streams(config, folder)], f"ipc://{folder}/server")


def test_data_that_is_wrong_ends_the_server_as_an_error_of_the_data(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    (shard,) = (tmp_path / "docs").glob("*.tar")
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    hook = Told()
    with pytest.raises(SourceError, match=shard.name):
        server.serve(hook)
    assert (hook.moments[0], hook.moments[-1]) == ("started", "stopping")
    assert set(hook.moments[1:-1]) == {"turned"}


def test_a_failure_that_nothing_explains_is_neither_the_datas_nor_the_contracts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = a_server(tmp_path)
    server.streams[0].producer.plan = None  # type: ignore[assignment]
    with pytest.raises(PipelineFailed, match="AttributeError") as raised:
        server.serve()
    assert not isinstance(raised.value, (SourceError, ContractError))
    assert "Traceback" in caplog.text


def test_a_server_that_never_served_can_be_closed_and_leaves_no_socket(tmp_path: Path) -> None:
    server = a_server(tmp_path)
    assert (tmp_path / "server").exists()
    for _ in range(2):
        server.close()
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("kind", [SourceError, ContractError, BadSample])
def test_another_text_leaves_an_error_in_its_branch_of_the_tree(kind: type[PackhorseError]) -> None:
    renamed = with_text(kind("the shard is cut"), "stream 'train': the shard is cut")
    assert str(renamed) == "stream 'train': the shard is cut"
    assert isinstance(kind("the shard is cut"), type(renamed))
    assert type(renamed) is not PackhorseError
