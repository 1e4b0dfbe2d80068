"""The producer's thread: what it says of the steps that it makes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from packhorse_service.protocol.effects import Made, Make
from packhorse_service.server.producer import Producer
from tests.harness import DEADLINE_S
from tests.service.corpus import inline_engine, make_plan, write_shard


def warnings_of(base: Path, masks: list[list[int]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said while the steps of samples with these loss masks are made, a sample a step."""
    samples = {f"s{number}": list(range(1, 9)) for number in range(len(masks))}
    write_shard(base / "ids" / "0.tar", samples, loss_masks=dict(zip(samples, masks, strict=True)))
    contract = {"seq_length": 8, "global_batch_size": 1, "vocab_size": 32}
    plan = make_plan(
        base, {"ids": {"shuffle": False, "epochs": 1, "shards": str(base / "ids" / "*.tar")}}, contract=contract
    )
    producer = Producer(plan, inline_engine(plan), lambda: None)
    producer.start()
    with caplog.at_level(logging.WARNING, "packhorse.producer"):
        for number in range(len(masks)):
            producer.requests.put(Make(0, number))
            made = producer.results.get(timeout=DEADLINE_S)
            assert isinstance(made, Made)
            assert made.step is not None, "a step without a trained token is served like any other"
    producer.requests.put(None)
    producer.join(DEADLINE_S)
    return [record.getMessage() for record in caplog.records]


def test_a_step_with_nothing_to_train_on_is_warned_of_with_its_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    some, none = [0] * 4 + [1] * 4, [0] * 8
    (said,) = warnings_of(tmp_path, [some, none, some], caplog)
    assert "step 1 of stream 'train'" in said
    assert "samples 's1' of shard" in said
    assert "loss masks" in said


def test_many_such_steps_are_warned_of_ever_more_rarely(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = warnings_of(tmp_path, [[0] * 8] * 9, caplog)
    assert [text.partition(" of stream")[0] for text in said] == ["step 0", "step 1", "step 3", "step 7"]
