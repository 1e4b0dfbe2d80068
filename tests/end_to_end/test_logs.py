"""What ``packhorse serve`` logs of a whole run: one line an event, and all that an operator asks first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packhorse import BatchContract, ParallelLayout
from tests.harness import DEADLINE_S, read_all, running_server, wait_until, write_config

LAYOUT = ParallelLayout(data=2)
SOURCES = {"a": {"shards": "a-*.tar", "over_length": "split"}}


def logged(folder: Path, *options: str) -> list[str]:
    """The lines of a run in which two ranks read everything and leave."""
    contract = {"seq_length": 64, "global_batch_size": 4, "vocab_size": 60_000}
    config = write_config(folder, layout={"data": 2}, contract=contract, sources=SOURCES)
    with running_server(config, *options) as server:
        read_all(server.endpoint, LAYOUT, BatchContract())
        wait_until(lambda: server.process.poll() is not None, "the end of the server", DEADLINE_S)
        assert server.process.returncode == 0
    return config.with_name("server.log").read_text().splitlines()


def test_as_json_each_line_is_an_event_with_its_fields(token_shards: Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in logged(token_shards, "--log-format", "json")]
    assert all(line["time"] and line["level"] and line["logger"].startswith("packhorse") for line in lines)
    by_event = {line["event"]: line for line in lines}
    assert by_event["contract"]["seq_length"] == 64
    assert by_event["derived"]["num_microbatches"] == 2
    assert any(event.startswith("listening on tcp://127.0.0.1:") for event in by_event)
    assert any(event.startswith("status page, metrics and probes at http://127.0.0.1:") for event in by_event)
    (account,) = (event for event in by_event if event.startswith("source 'a':"))
    assert "0 pending" in account


def test_as_text_they_say_the_same(token_shards: Path) -> None:
    text = "\n".join(logged(token_shards))
    for said in ("listening on tcp://", "contract  stream=train seq_length=64", "derived  stream=train", "status page"):
        assert said in text
    assert "Traceback" not in text


def test_only_what_was_asked_for_is_logged(token_shards: Path) -> None:
    assert logged(token_shards, "--log-level", "error") == []
