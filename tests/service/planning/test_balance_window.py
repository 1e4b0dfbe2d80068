"""Packs of a window are dealt to its steps alike at every layout, and from every place inside it on."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.errors import ConfigError, ContractError, ProtocolError
from packhorse_service.framing import FramedStep
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.snapshot.codec import DIGEST_BYTES, seal_snapshot
from tests.service.corpus import (
    Corpus,
    delivered_pairs,
    inline_engine,
    make_plan,
    microbatches,
    over_long_source,
    row_contents,
    rows_by_step,
    run_plan,
    stored_pairs,
)

MARK_AT = 44  # of a snapshot: behind the fixed head
MARK = struct.Struct("<HHHI8s")
Row = tuple[bytes, ...]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


def windowed(corpus: Corpus, window: int, data: int = 1, **contract: object) -> StreamPlan:
    return corpus.plan(
        of_each={"epochs": 2},
        layout={"data": data},
        contract={"global_batch_size": 8, **contract},
        packing={"window": window, "lookahead": 4},
    )


def by_window(steps: Sequence[FramedStep], plan: StreamPlan) -> list[Counter[Row]]:
    """The rows of each window, wherever they are dealt to; the last may have fewer steps."""
    rows, size = rows_by_step(steps, plan), plan.window.steps
    return [sum(rows[start : start + size], Counter[Row]()) for start in range(0, len(rows), size)]


# Which packs a step holds ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 3])
def test_a_step_holds_the_same_packs_at_every_layout_from_every_place_on(corpus: Corpus, window: int) -> None:
    """Also resumed inside a window, at another data-parallel size than the one that wrote the snapshot."""
    plans = {data: windowed(corpus, window, data) for data in (1, 2, 4, 8)}
    runs = {data: run_plan(plan) for data, plan in plans.items()}
    expected = rows_by_step(runs[1], plans[1])
    assert len(expected) >= 2 * window
    assert all(rows_by_step(run, plans[data]) == expected for data, run in runs.items())
    for written in zip(*runs.values(), strict=True):
        (snapshot,) = {step.snapshot for step in written}  # the layout is not in it
        for plan in plans.values():
            assert rows_by_step(run_plan(plan, snapshot), plan) == expected[written[0].step + 1 :]


@pytest.mark.parametrize(
    "contract",
    [{}, {"packing": "in_batch", "micro_batch_size": 2}, {"packing": "concat"}, {"remainder": "drop"}],
    ids=str,
)
@pytest.mark.parametrize("window", [2, 5, 64])
def test_every_snapshot_goes_on_with_the_same_bytes(corpus: Corpus, window: int, contract: dict[str, Any]) -> None:
    plan = windowed(corpus, window, 2, **contract)
    whole = run_plan(plan)
    for step in whole:
        assert run_plan(plan, step.snapshot) == whole[step.step + 1 :]


def test_one_pipeline_can_go_back_and_forth_inside_windows(corpus: Corpus) -> None:
    plan = windowed(corpus, 3)
    whole = run_plan(plan)
    pipeline = Pipeline(plan, inline_engine(plan))
    for step in random.Random(0).sample(whole, len(whole)):
        pipeline.restore(step.snapshot)
        assert pipeline.step == step.step + 1
        for following in whole[step.step + 1 : step.step + 3]:
            assert pipeline.next_step() == following


@pytest.mark.parametrize("window", [2, 3, 7])
def test_a_window_holds_the_packs_that_came_in_its_steps(corpus: Corpus, window: int) -> None:
    """Dealing changes to which step of the window a pack goes, and the packs themselves never."""
    plan, plain = windowed(corpus, window), windowed(corpus, 1)
    dealt, came = run_plan(plan), run_plan(plain)
    assert len(dealt) == len(came)
    in_windows = [
        sum(rows_by_step(came, plain)[start : start + window], Counter[Row]()) for start in range(0, len(came), window)
    ]
    assert by_window(dealt, plan) == in_windows
    assert rows_by_step(dealt, plan) != rows_by_step(came, plain)


def test_the_micro_batches_of_a_planned_step_are_in_the_order_in_which_they_came(corpus: Corpus) -> None:
    plan = windowed(corpus, 3)
    pipeline = Pipeline(plan, inline_engine(plan))
    while (planned := pipeline.next_planned_step()) is not None:
        oldest = [min(piece.number for piece in micro_batch.pieces) for micro_batch in planned.micro_batches]
        # The packer seeds each pack with the oldest pending sample.
        assert oldest == sorted(oldest)
        assert len(planned.costs) == len(planned.loss_tokens) == len(planned.micro_batches)


# The end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 3, 4, 64])
def test_an_incomplete_last_step_holds_the_last_packs_and_is_filled(corpus: Corpus, window: int) -> None:
    plan, plain = windowed(corpus, window), windowed(corpus, 1)
    *before, last = run_plan(plan)
    assert last.views == run_plan(plain)[-1].views, "a step of its own, as without windows"
    batches = microbatches(last, plan)
    assert 0 < sum(batch.filler for batch in batches) < len(batches) == 8
    assert not any(batch.filler for step in before for batch in microbatches(step, plan))


def test_an_incomplete_last_step_can_be_dropped(corpus: Corpus) -> None:
    padded, dropped = windowed(corpus, 3), windowed(corpus, 3, remainder="drop")
    assert rows_by_step(run_plan(dropped), dropped) == rows_by_step(run_plan(padded)[:-1], padded)


def test_windows_lose_and_repeat_no_target(tmp_path: Path) -> None:
    sources = over_long_source(tmp_path)
    for window in (1, 2, 64):
        plan = make_plan(tmp_path, sources, packing={"window": window}, layout={"data": 2})
        assert delivered_pairs(run_plan(plan), plan) == stored_pairs(sorted((tmp_path / "long").iterdir()))


# Resuming with other settings ------------------------------------------------------------------------

PACKING = {"window": 3, "lookahead": 4}
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "another window": ({"packing": PACKING | {"window": 2}}, r"packing\.window=2 and 4 packs a step;"),
    "no window": ({"packing": PACKING | {"window": 1}}, r"packing\.window=1 and 4 packs a step;"),
    "more packs a step": ({"contract": {"global_batch_size": 8}}, "=3 and 8 packs a step;"),
    "another lookahead": ({"packing": PACKING | {"lookahead": 30}}, "4 packs a step, and packs otherwise;"),
    "another alignment": ({"contract": {"segment_multiple": 4}}, "4 packs a step, and packs otherwise;"),
    "another cost": ({"packing": PACKING | {"hidden_size": 8}}, "4 packs a step, and packs otherwise;"),
}


@pytest.mark.parametrize("change", OTHERWISE)
def test_inside_a_window_other_settings_are_refused_and_where_windows_meet_they_are_not(
    tmp_path: Path, change: str
) -> None:
    """Steps of the window that were delivered hold packs that these settings would deal otherwise."""
    sections, said = OTHERWISE[change]
    sources = over_long_source(tmp_path)
    old = make_plan(tmp_path, sources, packing=PACKING)
    new = make_plan(tmp_path, sources, **{"packing": PACKING, **sections})
    whole, pairs = run_plan(old), stored_pairs(sorted((tmp_path / "long").iterdir()))
    complete = len(whole) - any(batch.filler for batch in microbatches(whole[-1], old))
    pipeline = Pipeline(new, inline_engine(new))
    for step in whole[:-1]:
        following = step.step + 1
        first, behind = following - following % 3, min(following - following % 3 + 3, complete)
        if following in (first, behind):
            before = delivered_pairs(whole[:following], old)
            assert before + delivered_pairs(run_plan(new, step.snapshot), new) == pairs
            continue
        with pytest.raises(ContractError, match=said) as error:
            pipeline.restore(step.snapshot)
        assert f"step {following} is inside a window of steps {first} … {behind - 1}, assigned with" in str(error.value)
        assert f"or from step {first} or {behind}, where windows meet" in str(error.value)


def test_a_refused_snapshot_inside_a_window_leaves_the_pipeline_where_it_was(corpus: Corpus) -> None:
    plan = windowed(corpus, 2)
    whole, foreign = run_plan(plan), run_plan(windowed(corpus, 3), limit=1)[0].snapshot
    pipeline = Pipeline(plan, inline_engine(plan))
    assert pipeline.next_step() == whole[0]
    with pytest.raises(ContractError):
        pipeline.restore(foreign)
    assert pipeline.next_step() == whole[1]


# Snapshots from strangers ----------------------------------------------------------------------------


def test_a_snapshot_holds_where_its_window_began_and_how_it_was_dealt(corpus: Corpus) -> None:
    plan = windowed(corpus, 3)
    whole = run_plan(plan)
    marks = [MARK.unpack_from(step.snapshot, MARK_AT) for step in whole[:3]]
    assert marks == [
        (1, 3, 3, 8, plan.window.digest),
        (2, 3, 3, 8, plan.window.digest),
        (0, 0, 3, 8, plan.window.digest),
    ]
    # Inside a window only the mark differs; where it ends the stream has moved on.
    contents = [step.snapshot[:-DIGEST_BYTES] for step in whole[:3]]
    one, two, three = (content[:MARK_AT] + content[MARK_AT + MARK.size :] for content in contents)
    assert one == two != three


@pytest.mark.parametrize(
    "mark", [(3, 3, 3), (4, 3, 3), (1, 1, 3), (1, 4, 3), (0, 3, 3), (3, 0, 3), (0xFFFF, 0xFFFF, 0xFFFF)]
)
def test_an_impossible_place_inside_a_window_is_refused(corpus: Corpus, mark: tuple[int, int, int]) -> None:
    plan = windowed(corpus, 3)
    snapshot = bytearray(run_plan(plan, limit=1)[0].snapshot)
    MARK.pack_into(snapshot, MARK_AT, *mark, 8, plan.window.digest)
    with pytest.raises(ProtocolError, match="window"):
        Pipeline(plan, inline_engine(plan)).restore(seal_snapshot(bytes(snapshot[:-DIGEST_BYTES])))


def test_a_window_that_our_data_cannot_fill_is_refused(corpus: Corpus) -> None:
    plan = windowed(corpus, 3)
    snapshot = bytearray(run_plan(plan, limit=1)[0].snapshot)
    MARK.pack_into(snapshot, MARK_AT, 1, 2, 3, 8, plan.window.digest)  # it was no shorter one
    pipeline = Pipeline(plan, inline_engine(plan))
    pipeline.restore(seal_snapshot(bytes(snapshot[:-DIGEST_BYTES])))
    with pytest.raises(ProtocolError, match="the window at step 0 had 2 steps, our data has 3"):
        pipeline.next_step()


# Where windows make no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "contract",
    [
        {"packing": "none"},
        {"packing": "none", "micro_batch_size": 2},
        {"packing": "concat", "isolate_documents": False},
    ],
    ids=str,
)
def test_a_window_of_rows_that_cost_the_same_is_refused(corpus: Corpus, contract: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"packing\.window=2 needs rows that differ in cost.*leave packing\.window"):
        windowed(corpus, 2, **contract)
    assert windowed(corpus, 1, **contract).window.steps == 1


def test_steps_are_dealt_anew_in_every_window(corpus: Corpus) -> None:
    """The seed of a window is made of its costs: no place in a window always gets the same stratum."""
    plan = corpus.plan(of_each={"epochs": "endless"}, packing={"window": 2}, contract={"global_batch_size": 4})
    steps = run_plan(plan, limit=24)
    first_is_longer = []
    for one, two in islice(pairwise(steps), 0, None, 2):
        longest = [max(row_tokens(step, plan)) for step in (one, two)]
        first_is_longer.append(longest[0] >= longest[1])
    assert set(first_is_longer) == {True, False}


def row_tokens(step: FramedStep, plan: StreamPlan) -> list[int]:
    return [int(np.diff(batch.cu_seqlens).max()) for batch in microbatches(step, plan)]


def test_rows_are_those_of_the_pack_stream_with_any_window(corpus: Corpus) -> None:
    plans = [windowed(corpus, window) for window in (1, 4)]
    runs = [[row_contents(b) for s in run_plan(p) for b in microbatches(s, p) if not b.filler] for p in plans]
    assert Counter(runs[0]) == Counter(runs[1])
