"""Whatever has state goes on from what it saved, in a process that knows nothing else of it."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.service.corpus import Corpus
from tests.service.stages import STAGES, Machine, Saved, machine, outputs, rest_of

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    """A process that is started anew for the test."""
    monkeypatch.syspath_prepend(str(ROOT))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def run_to_the_end(made: Machine) -> tuple[list[object], list[Saved]]:
    """All outputs, and what is saved before, between and behind them."""
    given, saved = list[object](), [copy.deepcopy(made.save())]
    for output in outputs(made):
        given.append(output)
        saved.append(copy.deepcopy(made.save()))
    return given, saved


@pytest.mark.parametrize("stage", STAGES)
def test_saved_at_every_point_a_stage_gives_the_rest_in_a_new_process(
    corpus: Corpus, elsewhere: ProcessPoolExecutor, stage: str
) -> None:
    given, saved = run_to_the_end(machine(stage, corpus.base))
    assert len(given) >= 6, "there are points inside"
    rests = [elsewhere.submit(rest_of, stage, corpus.base, each) for each in saved]
    for number, rest in enumerate(rests):
        assert rest.result(DEADLINE_S) == given[number:]
