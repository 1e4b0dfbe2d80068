"""A server and clients of other versions of the protocol over a real socket: each side learns what to install."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from packhorse import Feed, HandshakeRefused, __version__
from packhorse.protocol import reader_progress
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.pipeline.all_streams import plan_streams
from packhorse_service.server.server import Server
from tests.client.wire.other_versions import NEXT_VERSION, VERSION_1, hello_of
from tests.harness import DEADLINE_S
from tests.service.corpus import inline_engine, random_lengths, write_source


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_source(tmp_path / "docs", random_lengths(1, 2, 20, longest=60))
    contract = {"seq_length": 64, "global_batch_size": 2, "vocab_size": 10_000}
    sources = {"docs": {"shards": "docs/*.tar"}}
    config = ServeConfig.model_validate({"contract": contract, "sources": sources})
    server = Server(
        [(plan, inline_engine(plan)) for plan in plan_streams(config, tmp_path)], f"ipc://{tmp_path}/server"
    )
    serving = threading.Thread(target=server.serve)
    serving.start()
    yield server
    server.stop("the test")
    serving.join()


def answer(server: Server, header: bytes) -> tuple[str, dict[str, Any]]:
    """What a client with no code of ours reads of the first answer to its HELLO."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(server.endpoint)
        dealer.send(header)
        assert dealer.poll(int(1000 * DEADLINE_S)), "the server says nothing"
        (frame,) = dealer.recv_multipart()
    tag, fields = msgpack.unpackb(frame)
    return tag, fields


@pytest.mark.parametrize(
    ("header", "versions"),
    [
        (VERSION_1, "1"),
        (hello_of(NEXT_VERSION, NEXT_VERSION, contract={"in": "another form"}), str(NEXT_VERSION)),
        (hello_of(NEXT_VERSION - 1, NEXT_VERSION, surprise=1), f"{NEXT_VERSION - 1} … {NEXT_VERSION}"),
    ],
    ids=["older", "newer", "both, in another form"],
)
def test_a_client_of_another_version_is_told_what_to_install(server: Server, header: bytes, versions: str) -> None:
    tag, fields = answer(server, header)
    (violation,) = fields["violations"]
    assert (tag, fields["stream"]) == ("REJECT", "train")
    assert set(violation) == {"rule", "severity", "field", "want", "got", "remedy"}
    assert (violation["rule"], violation["severity"]) == ("PROTOCOL", "error")
    assert violation["got"].startswith(versions)
    assert f"install packhorse {__version__}" in violation["remedy"]


def test_a_feed_of_another_version_raises_what_to_install(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_progress, "PROTOCOL_VERSION", NEXT_VERSION)
    with (
        Feed(server.endpoint, arrays="numpy", start_timeout=DEADLINE_S) as feed,
        pytest.raises(HandshakeRefused) as error,
    ):
        next(feed)
    assert [violation.rule for violation in error.value.violations] == ["PROTOCOL"]
    assert f"install packhorse {__version__}" in str(error.value)
