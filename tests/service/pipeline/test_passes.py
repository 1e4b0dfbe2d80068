"""A stream that is read in passes: each holds every target once, in the same rows, from every snapshot on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from packhorse.errors import ConfigError, ContractError, SourceError
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.framing import FramedStep
from packhorse_service.pipeline.all_streams import plan_streams
from packhorse_service.pipeline.plan import StreamPlan, plan_stream
from packhorse_service.pipeline.run import Pipeline
from tests.service.corpus import (
    VOCABULARY,
    Corpus,
    delivered_pairs,
    inline_engine,
    microbatches,
    row_contents,
    run_plan,
    stored_pairs,
)

CONTRACT = {"seq_length": 64, "global_batch_size": 4, "vocab_size": VOCABULARY}
PASSES = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


def configured(train: Mapping[str, Any] | None = None, /, **validation: Any) -> ServeConfig:
    """Trains on two sources, evaluates on all three; training drops what is left over. ``train`` is of its contract."""
    sources = {name: {"shards": f"{name}/part-*.tar"} for name in ("docs", "chat")}
    return ServeConfig.model_validate(
        {
            "contract": {**CONTRACT, "remainder": "drop", **(train or {})},
            "sources": sources,
            "loading": {"workers": 0, "block_bytes": 4096},
            "streams": {"validation": {"sources": {**sources, "own": {"shards": "own/part-*.tar"}}, **validation}},
        }
    )


def validation_plan(corpus: Corpus, **validation: Any) -> StreamPlan:
    return plan_stream(configured(**validation), corpus.base, "validation")


Place = list[tuple[FramedStep | None, bytes]]  # each step, END being none, and the snapshot behind it


def passes_of(pipeline: Pipeline, count: int) -> Place:
    made: Place = []
    while count:
        step = pipeline.next_step()
        count -= step is None
        made.append((step, pipeline.begin_pass() if step is None else step.snapshot))
    return made


def contents(made: Place, plan: StreamPlan) -> list[list[list[tuple[bytes, ...]]]]:
    """[pass][step][micro-batch]; nothing behind the last END."""
    passes: list[list[list[tuple[bytes, ...]]]] = [[]]
    for step, _ in made:
        if step is None:
            passes.append([])
        else:
            passes[-1].append([(*row_contents(mb), bytes([mb.filler])) for mb in microbatches(step, plan)])
    assert passes.pop() == []
    return passes


SHAPES: dict[str, dict[str, Any]] = {
    "as training": {},
    "longer rows": {"contract": {"seq_length": 128, "global_batch_size": 2}},
    "windows": {"packing": {"window": 3}},
    "in batch": {"contract": {"packing": "in_batch", "micro_batch_size": 2}},
    "documents": {"contract": {"packing": "concat"}},
    "two ranks": {"layout": {"data": 2}},
    "two epochs": {
        "sources": {"docs": {"shards": "docs/part-*.tar", "epochs": 2}, "chat": {"shards": "chat/part-*.tar"}}
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pass_is_the_same_and_holds_every_target_once(corpus: Corpus, shape: str) -> None:
    plan = validation_plan(corpus, **SHAPES[shape])
    made = passes_of(Pipeline(plan, inline_engine(plan)), PASSES)
    first, *others = contents(made, plan)
    assert others == [first] * (PASSES - 1)
    steps = [step for step, _ in made[: len(first)] if step is not None]
    expected: Counter[Any] = Counter()
    for setting in plan.sources:
        pairs = stored_pairs(corpus.shards[setting.order.name])
        expected += Counter({pair: n * (setting.order.epochs or 0) for pair, n in pairs.items()})
    found = delivered_pairs(steps, plan)
    # What a source with labels of its own does not train on has no target that could be compared.
    untrained = {pair[0] for pair in expected if pair[1] == -100}
    assert {p: n for p, n in found.items() if p[0] not in untrained} == {
        p: n for p, n in expected.items() if p[0] not in untrained
    }
    assert sum(found.values()) == sum(expected.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_go_on_counting_and_end_takes_one(corpus: Corpus, shape: str) -> None:
    plan = validation_plan(corpus, **SHAPES[shape])
    made = passes_of(Pipeline(plan, inline_engine(plan)), PASSES)
    assert all(step.step == number for number, (step, _) in enumerate(made) if step is not None)


@pytest.mark.parametrize("shape", SHAPES)
def test_from_every_snapshot_on_all_is_the_same_also_behind_the_end_of_a_pass(corpus: Corpus, shape: str) -> None:
    plan = validation_plan(corpus, **SHAPES[shape])
    made = passes_of(Pipeline(plan, inline_engine(plan)), 2)
    for place, (_, snapshot) in enumerate(made[:-1], start=1):
        pipeline = Pipeline(plan, inline_engine(plan))
        pipeline.restore(snapshot)
        ends = sum(step is None for step, _ in made[place:])
        rest = passes_of(pipeline, ends)
        assert [behind for _, behind in rest] == [behind for _, behind in made[place:]]
        assert [step and step.step for step, _ in rest] == [step and step.step for step, _ in made[place:]]
        assert contents([*rest], plan) == contents(made[place:], plan)


def test_what_training_drops_an_evaluation_fills_up(corpus: Corpus) -> None:
    config = configured({"global_batch_size": 7})
    train, validation = plan_streams(config, corpus.base)
    assert (train.name, train.passes, train.contract.remainder) == ("train", False, "drop")
    assert (validation.name, validation.passes, validation.contract.remainder) == ("validation", True, "pad")
    stored = sum(stored_pairs([*corpus.shards["docs"], *corpus.shards["chat"]]).values())
    assert sum(delivered_pairs(run_plan(train), train).values()) < stored
    steps = run_plan(validation)
    assert any(mb.filler for mb in microbatches(steps[-1], validation))


def test_what_a_stream_leaves_out_is_that_of_the_top_level() -> None:
    config = ServeConfig.model_validate(
        {
            "seed": 3,
            "layout": {"data": 2, "context": 2},
            "contract": {**CONTRACT, "segment_multiple": 8},
            "packing": {"lookahead": 9, "hidden_size": 64},
            "mixing": {"by": "samples"},
            "sources": {"docs": {"shards": "docs/*.tar"}},
            "streams": {
                "validation": {
                    "layout": {"context": 1, "data": 4},
                    "contract": {"global_batch_size": 8},
                    "packing": {"hidden_size": 32},
                    "sources": {"own": {"shards": "own/*.tar"}},
                }
            },
        }
    ).of_stream("validation")
    assert (config.layout.data, config.layout.context, config.seed) == (4, 1, 3)
    assert (config.contract.seq_length, config.contract.global_batch_size, config.contract.segment_multiple) == (
        64,
        8,
        8,
    )
    assert (config.packing.lookahead, config.packing.hidden_size) == (9, 32)
    assert list(config.sources) == ["own"]
    assert (config.mixing.by, config.streams) == ("tokens", {})


@pytest.mark.parametrize(
    ("validation", "named"),
    [
        ({"contract": {"seq_length": None}}, r"streams\.validation\.contract\.seq_length: required"),
        ({"sources": {"x": {"shards": "no-such-*.tar"}}}, r"streams\.validation\.sources\.x\.shards: "),
        ({"packing": {"tail_slots": 64}}, r"streams\.validation\.packing\.tail_slots=64 leaves no room"),
        ({"contract": {"micro_batch_size": 2}}, r"streams\.validation: the contract does not hold:\n  MBS_ONLINE"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_further_stream_is_said_with_its_name(
    corpus: Corpus, validation: dict[str, Any], named: str
) -> None:
    with pytest.raises((ConfigError, ContractError, SourceError), match=named):
        plan_streams(configured(**validation), corpus.base)


def test_a_stream_of_passes_is_no_part_of_the_trained_one(corpus: Corpus) -> None:
    """What evaluates changes neither the fingerprint nor the bytes of training."""
    with_it, _ = plan_streams(configured(), corpus.base)
    config = configured().model_copy(update={"streams": {}})
    (alone,) = plan_streams(config, corpus.base)
    assert with_it.fingerprint == alone.fingerprint
    assert [step.snapshot for step in run_plan(with_it)] == [step.snapshot for step in run_plan(alone)]
