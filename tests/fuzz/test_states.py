"""States of a checkpoint, damaged or put together of others: refused, or exact, and never silently another place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Any

import pytest

from packhorse.contract.position import Position
from packhorse.errors import ContractError, ProtocolError
from packhorse.protocol.checkpoint_state import FeedState, read_states, seal_state, write_states
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.snapshot import codec
from tests.fuzz.mutation import bytes_like, trees_like
from tests.service.corpus import Corpus, inline_engine, steps_of

MUTATIONS = 10_000
STEPS_COMPARED = 2


class Outcome(Enum):
    REFUSED = auto()
    EXACT = auto()
    WRONG = auto()


@dataclass
class Job:
    """A stream, what it delivers, and the snapshot before each of its steps."""

    plan: StreamPlan
    rows: list[list[bytes]]  # digests, by step
    snapshots: list[bytes]  # none before step 0

    @classmethod
    def of(cls, plan: StreamPlan) -> Job:
        steps = steps_of(Pipeline(plan, inline_engine(plan)), limit=8)
        return cls(plan, [_rows(step) for step in steps], [b"", *(bytes(step.snapshot) for step in steps)])

    def resume(self, snapshot: bytes, step: int) -> Outcome:
        """What becomes of a job whose readers stand before ``step`` and hold this snapshot."""
        pipeline = Pipeline(self.plan, inline_engine(self.plan))
        try:
            pipeline.restore(snapshot, step)
        except (ContractError, ProtocolError):
            return Outcome.REFUSED
        made = [_rows(each) for each in steps_of(pipeline, limit=STEPS_COMPARED)]
        return Outcome.EXACT if made == self.rows[step : step + STEPS_COMPARED] else Outcome.WRONG

    def states(self) -> list[dict[str, object]]:
        return [
            write_states(FeedState("train", Position(step, 0), bytes(16), snapshot), ())
            for step, snapshot in enumerate(self.snapshots)
            if 0 < step < len(self.rows)
        ]


def _rows(step: Any) -> list[bytes]:
    return [view.body.row_digest for view in step.views_of(next(iter(step.views)))]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job.of(Corpus.written(tmp_path_factory.mktemp("data")).plan())


@pytest.fixture(scope="module")
def other_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Of the same data in another order."""
    return Job.of(Corpus.written(tmp_path_factory.mktemp("data")).plan(seed=7))


def flipped(snapshot: bytes) -> Iterator[bytes]:
    """Every snapshot that differs from this one in one bit."""
    for bit in range(8 * len(snapshot)):
        data = bytearray(snapshot)
        data[bit // 8] ^= 1 << bit % 8
        yield bytes(data)


def test_an_undamaged_state_is_exact_at_every_step(job: Job) -> None:
    for step in range(1, len(job.rows)):
        assert job.resume(job.snapshots[step], step) is Outcome.EXACT


@pytest.mark.parametrize("step", [1, 5])
def test_a_snapshot_with_any_one_bit_flipped_is_refused(job: Job, step: int) -> None:
    outcomes = [job.resume(snapshot, step) for snapshot in flipped(job.snapshots[step])]
    assert set(outcomes) == {Outcome.REFUSED}
    assert len(outcomes) > 800


def test_a_bit_of_a_snapshot_is_a_sample_where_no_digest_is_compared(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the two tests around this one look for does happen."""
    monkeypatch.setattr(codec, "_digest", lambda content: bytes(codec.DIGEST_BYTES))
    sealed = job.snapshots[5][: -codec.DIGEST_BYTES]
    outcomes = {job.resume(snapshot + bytes(codec.DIGEST_BYTES), 5) for snapshot in flipped(sealed)}
    assert Outcome.WRONG in outcomes


def test_a_snapshot_of_another_step_or_another_job_is_refused(job: Job, other_job: Job) -> None:
    steps = range(1, len(job.rows))
    for step, other in product(steps, steps):
        expected = Outcome.EXACT if step == other else Outcome.REFUSED
        assert job.resume(job.snapshots[other], step) is expected
        assert job.resume(other_job.snapshots[other], step) is Outcome.REFUSED


def texts(states: list[dict[str, object]], seed: int) -> Iterator[str | bytes]:
    """Texts that are almost those of states: of their bytes, and of their values."""
    yield from map(json.dumps, trees_like(states, MUTATIONS // 2, seed))
    yield from bytes_like([json.dumps(state).encode() for state in states], MUTATIONS // 2, seed)


def read(state: Any) -> FeedState | None:
    try:
        return read_states(state, "train")["train"]
    except ContractError:
        return None


def test_a_state_that_is_not_as_it_was_written_is_refused(job: Job) -> None:
    states = job.states()
    right = [read(state) for state in states]
    accepted = 0
    for text in texts(states, seed=1):
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):
            continue  # who reads the checkpoint has an error already
        found = read(state)
        if found is not None:
            accepted += 1
            assert found in right
    assert accepted < MUTATIONS // 10


def parts_exchanged(one: Mapping[str, object], other: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Every state that has some parts of one and the rest of another, its digest made for that."""
    parts = ("position", "fingerprint", "snapshot")
    for chosen in product((one, other), repeat=len(parts)):
        yield seal_state({**one, **{name: of[name] for name, of in zip(parts, chosen, strict=True)}})


def test_a_state_put_together_of_two_is_refused_or_exact_even_where_its_digest_was_made_for_it(
    job: Job, other_job: Job
) -> None:
    states, outcomes = [*job.states(), *other_job.states()], set()
    for one, other in product(job.states(), states):
        for state in parts_exchanged(one, other):
            found = read(state)
            outcomes.add(Outcome.REFUSED if found is None else job.resume(found.snapshot, found.position.step))
    assert outcomes == {Outcome.REFUSED, Outcome.EXACT}


def test_mutations_whose_digest_was_made_for_them_are_refused_or_exact(job: Job) -> None:
    outcomes = dict.fromkeys(Outcome, 0)
    for tree in trees_like(job.states(), MUTATIONS, 3):
        try:
            found = read(seal_state(tree))
        except (ContractError, KeyError, TypeError, AttributeError):
            found = None  # nothing of that can be a state, and no digest be made for it
        inside = found is not None and (found.position.index > 0 or found.position.step == 0)
        if found is None or inside:
            continue  # refused, at the start, or inside a step, where the stream's fingerprint is compared too
        outcomes[job.resume(found.snapshot, found.position.step)] += 1
    assert outcomes[Outcome.WRONG] == 0
    assert outcomes[Outcome.REFUSED] > 10
    assert outcomes[Outcome.EXACT] > 10
