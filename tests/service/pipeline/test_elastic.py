"""Another seq_length, alignment, lookahead or layout from a checkpoint on, again and again: every target once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.errors import ContractError, ProtocolError, SourceError
from packhorse_service.framing import FramedStep
from packhorse_service.mixing import replay_log
from packhorse_service.mixing.order import OrderCursor
from packhorse_service.mixing.over_length import CUT_LENGTHS_LIMIT
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.snapshot.codec import decode_snapshot
from tests.service.corpus import (
    Corpus,
    Pair,
    inline_engine,
    make_plan,
    microbatches,
    over_long_source,
    random_lengths,
    read_shards,
    rows_by_step,
    run_plan,
    stored_pairs,
    write_source,
)

Sections = dict[str, Any]


def delivered(steps: Sequence[FramedStep], plan: StreamPlan) -> Counter[Pair]:
    """How often each (input, target) is delivered, by the labels alone: rows of any mode."""
    found = Counter[Pair]()
    for step in steps:
        for batch in microbatches(step, plan):
            if not batch.filler:
                inputs, targets = batch.tokens.ravel().tolist(), batch.labels.ravel().tolist()
                found.update((i, t) for i, t in zip(inputs, targets, strict=True) if t != -100)
    return found


def resumed(plan: StreamPlan, snapshot: bytes) -> tuple[Pipeline, tuple[str, ...]]:
    pipeline = Pipeline(plan, inline_engine(plan))
    return pipeline, pipeline.restore(snapshot)


def spread(steps: Sequence[FramedStep], count: int = 6) -> Sequence[FramedStep]:
    return steps[:: max(1, len(steps) // count)]


# One change ------------------------------------------------------------------------------------------

MODES: dict[str, Sections] = {
    "online": {},
    "online, first-fit": {"packing": {"algorithm": "first_fit_decreasing"}},
    "online, window": {"packing": {"window": 2}},
    "in_batch": {"contract": {"packing": "in_batch", "micro_batch_size": 2}},
    "none": {"contract": {"packing": "none", "micro_batch_size": 2}},
    "concat": {"contract": {"packing": "concat"}},
}
SHAPES: dict[str, Sections] = {
    "half": {"seq_length": 32},
    "an odd part": {"seq_length": 23},
    "double": {"seq_length": 128},
    "more than the longest": {"seq_length": 500},
    "aligned": {"segment_multiple": 8},
    "half and aligned": {"seq_length": 32, "segment_multiple": 8},
    "a larger step": {"seq_length": 48, "global_batch_size": 8},
}


def changed(base: Mapping[str, Any], contract: Mapping[str, Any], **sections: Any) -> Sections:
    """The sections of a mode, in another shape."""
    packing = {**base.get("packing", {}), **sections.pop("packing", {})}
    return {**base, **sections, "packing": packing, "contract": {**base.get("contract", {}), **contract}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_another_shape_delivers_every_target_once_and_the_warning_names_the_step(
    tmp_path: Path, mode: str, shape: str
) -> None:
    """Pieces of cut samples wait in most snapshots; they are cut again where they are too long now."""
    sources = over_long_source(tmp_path)
    old, new = (make_plan(tmp_path, sources, **changed(MODES[mode], c)) for c in ({}, SHAPES[shape]))
    whole, pairs = run_plan(old), stored_pairs(sorted((tmp_path / "long").iterdir()))
    assert delivered(whole, old) == pairs
    for step in spread(whole):
        if (step.step + 1) % old.window.steps:
            continue
        pipeline, said = resumed(new, step.snapshot)
        rest = list(iter(pipeline.next_step, None))
        assert delivered(whole[: step.step + 1], old) + delivered(rest, new) == pairs
        assert any(f"from step {step.step + 1} on packs differ" in line for line in said)
        named = {f"contract.{k} {getattr(old.contract, k)} → {v}" for k, v in SHAPES[shape].items()}
        assert all(any(line.count(name) for line in said) for name in named if "global_batch_size" not in name)
        for later in spread(rest, 3):
            assert run_plan(new, later.snapshot) == rest[later.step - step.step :]


@pytest.mark.parametrize("length", [16, 48, 200])
def test_an_endless_run_goes_on_in_rows_of_another_length(tmp_path: Path, length: int) -> None:
    """Every id is an input once, in the same order, but the very last."""
    sources = over_long_source(tmp_path)
    base = {"packing": "concat", "isolate_documents": False, "micro_batch_size": 2}
    old, new = (make_plan(tmp_path, sources, contract={**base, "seq_length": n}) for n in (64, length))
    whole = run_plan(old)
    everything = inputs(whole, old)
    assert Counter(everything).most_common(1)[0][1] == 1
    for step in spread(whole):
        rest, _ = resumed(new, step.snapshot)
        assert inputs(whole[: step.step + 1], old) + inputs(list(iter(rest.next_step, None)), new) == everything


def inputs(steps: Sequence[FramedStep], plan: StreamPlan) -> list[int]:
    found = []
    for step in steps:
        for batch in microbatches(step, plan):
            if not batch.filler:
                found += batch.tokens.ravel()[batch.labels.ravel() != -100].tolist()
    return found


@pytest.mark.parametrize("window", [1, 2])
def test_the_same_settings_say_nothing_at_any_data_parallel_size(tmp_path: Path, window: int) -> None:
    """From 1, 2, 4 and 8 ranks to each other, in and between windows: the same packs in the same steps."""
    sources = over_long_source(tmp_path)
    plans = {
        data: make_plan(
            tmp_path,
            sources,
            layout={"data": data},
            contract={"global_batch_size": 8},
            packing={"window": window, "lookahead": 3},
        )
        for data in (1, 2, 4, 8)
    }
    expected = rows_by_step(run_plan(plans[1]), plans[1])
    for old in plans.values():
        for step in spread(run_plan(old), 3):
            for new in plans.values():
                pipeline, said = resumed(new, step.snapshot)
                assert said == ()
                assert rows_by_step(list(iter(pipeline.next_step, None)), new) == expected[step.step + 1 :]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"packing": "concat"}, {}),
        ({}, {"packing": "concat"}),
        ({"packing": "concat"}, {"packing": "concat", "isolate_documents": False}),
        ({"packing": "none"}, {"packing": "concat", "isolate_documents": False}),
    ],
    ids=str,
)
def test_a_mode_with_other_targets_is_refused(tmp_path: Path, before: Sections, after: Sections) -> None:
    sources = over_long_source(tmp_path)
    old, new = (make_plan(tmp_path, sources, contract=contract) for contract in (before, after))
    snapshot = run_plan(old, limit=1)[0].snapshot
    with pytest.raises(ContractError, match=r"made with contract\.packing .*resume with the mode of the checkpoint"):
        resumed(new, snapshot)


def test_a_closed_lookahead_may_go_on_with_another_algorithm(tmp_path: Path) -> None:
    sources = over_long_source(tmp_path)
    old = make_plan(tmp_path, sources, packing={"algorithm": "best_fit_decreasing"})
    new = make_plan(tmp_path, sources, contract={"packing": "in_batch", "micro_batch_size": 4})
    whole, pairs = run_plan(old), stored_pairs(sorted((tmp_path / "long").iterdir()))
    for step in spread(whole):
        pipeline, _ = resumed(new, step.snapshot)
        account = pipeline.counts["long"]
        assert account.packed + account.pending == account.targets
        rest = delivered(list(iter(pipeline.next_step, None)), new)
        assert delivered(whole[: step.step + 1], old) + rest == pairs


# Policies that lose targets --------------------------------------------------------------------------

LOSSY = ("truncate_left", "truncate_right", "drop")


def lossy_plan(base: Path, policy: str, length: int, *, lookahead: int = 8, **of_source: object) -> StreamPlan:
    if not (base / "docs").exists():
        write_source(base / "docs", random_lengths(5, 3, 14, longest=150))
    source = {"shards": "docs/part-*.tar", "over_length": policy, **of_source}
    return make_plan(base, {"docs": source}, contract={"seq_length": length}, packing={"lookahead": lookahead})


@pytest.mark.parametrize("length", [32, 128])
@pytest.mark.parametrize("policy", LOSSY)
def test_a_policy_that_loses_targets_repeats_none_and_loses_none_of_what_fits(
    tmp_path: Path, policy: str, length: int
) -> None:
    """What fits both lengths is delivered once; what was drawn at 64 and waits is shortened or dropped at 32."""
    old, new = (lossy_plan(tmp_path, policy, n) for n in (64, length))
    whole = run_plan(old)
    fitting = Counter[Pair]()
    for sample in read_shards(sorted((tmp_path / "docs").iterdir())):
        if len(sample.ids) - 1 <= min(64, length):
            fitting.update(sample.pairs())
    for step in spread(whole):
        pipeline, _ = resumed(new, step.snapshot)
        account = pipeline.counts["docs"]
        assert account.pending >= 0
        found = delivered(whole[: step.step + 1], old) + delivered(list(iter(pipeline.next_step, None)), new)
        assert not fitting - found
        assert set(found.values()) == {1}
        assert account.pending == 0
        assert account.packed + account.lost_targets == account.targets


def test_what_was_packed_before_it_became_too_long_stays_packed_in_the_account(tmp_path: Path) -> None:
    old, new = (lossy_plan(tmp_path, "drop", n) for n in (64, 32))
    differ = 0
    for step in run_plan(old):
        (before, _), (after, _) = (resumed(plan, step.snapshot) for plan in (old, new))
        assert after.counts["docs"].packed == before.counts["docs"].packed
        differ += after.counts["docs"].dropped_samples > before.counts["docs"].dropped_samples
    assert differ


@pytest.mark.parametrize("policy", LOSSY)
def test_what_was_cut_or_dropped_stays_so_when_rows_get_longer(tmp_path: Path, policy: str) -> None:
    """There and back: 64, 32 and 64 again deliver of what waited no more than 32 left of it."""
    at_64, at_32 = (lossy_plan(tmp_path, policy, n) for n in (64, 32))
    whole = run_plan(at_64)
    for step in spread(whole[:-1]):
        pipeline, _ = resumed(at_32, step.snapshot)
        snapshot = pipeline.next_step()
        assert snapshot is not None
        back, _ = resumed(at_64, snapshot.snapshot)
        found = delivered([*whole[: step.step + 1]], at_64) + delivered([snapshot], at_32)
        found += delivered(list(iter(back.next_step, None)), at_64)
        assert set(found.values()) == {1}


def test_a_waiting_sample_that_is_over_length_now_is_an_error_that_names_it(tmp_path: Path) -> None:
    old, new = (lossy_plan(tmp_path, "error", n) for n in (150, 64))
    snapshot = run_plan(old, limit=1)[0].snapshot
    said = r"a sample that waits cannot be used any more: shard 'part-.*\.tar', sample '\d+': \d+ slots are more than "
    with pytest.raises(ContractError, match=said + "seq_length=64; set over_length to split, .*or raise seq_length"):
        resumed(new, snapshot)


def test_a_waiting_sample_that_is_over_length_now_is_skipped_under_a_budget_that_later_snapshots_know(
    tmp_path: Path,
) -> None:
    old, new = (lossy_plan(tmp_path, "error", n, lookahead=2, skip_budget=40) for n in (150, 64))
    first = run_plan(old, limit=1)[0]
    pipeline, _ = resumed(new, first.snapshot)
    waited = pipeline.counts["docs"].faults
    rest = list(iter(pipeline.next_step, None))
    found = delivered([first], old) + delivered(rest, new)
    assert set(found.values()) == {1}
    for step in rest:
        again, _ = resumed(new, step.snapshot)
        assert list(iter(again.next_step, None)) == rest[step.step :]
    # The budget holds for the whole run: snapshots count what was skipped on resuming, too.
    used = pipeline.counts["docs"].faults
    assert 0 < waited < used
    end = decode_snapshot(
        rest[-1].snapshot,
        new.fingerprint,
        OrderCursor.at_start((source.order for source in new.sources), new.mixing),
    )
    since = resumed(new, rest[-1].snapshot)[0].counts["docs"].faults
    assert end.cursor.order.sources[0].faults + since == used
    tight = [lossy_plan(tmp_path, "error", n, lookahead=2, skip_budget=used - 1) for n in (150, 64)]
    again, _ = resumed(tight[1], run_plan(tight[0], limit=1)[0].snapshot)
    with pytest.raises(SourceError, match=f"skip_budget of {used - 1} is used up"):
        list(iter(again.next_step, None))


# Chains ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Settings, and how many steps are made with them."""

    sections: Sections
    steps: int


@st.composite
def links(draw: st.DrawFn) -> Link:
    """Of the modes that share their targets; every setting that may change from link to link."""
    mode = draw(st.sampled_from(["online", "online", "in_batch", "none"]))
    context = draw(st.sampled_from([1, 1, 2]))
    packing = {
        "lookahead": draw(st.sampled_from([1, 3, 30])),
        "window": 1 if mode == "none" else draw(st.sampled_from([1, 1, 2, 3])),
        "algorithm": draw(st.sampled_from(["fifo_exact_tail", "first_fit_decreasing", "best_fit_decreasing"])),
        "tail_slots": draw(st.sampled_from([0, 0, 3])) if mode == "online" else 0,
    }
    contract = {
        "packing": mode,
        "micro_batch_size": 1 if mode == "online" else 2,
        "seq_length": draw(st.sampled_from([16, 24, 32, 64, 96, 400])),
        "segment_multiple": draw(st.sampled_from([1, 2, 4, 8] if context == 1 else [4, 8])),
        "global_batch_size": draw(st.sampled_from([4, 8])),
        "max_segments": draw(st.sampled_from([None, None, 2])) if mode == "online" else None,
    }
    layout = {"data": draw(st.sampled_from([1, 2])), "context": context}
    sections: Sections = {"packing": packing, "contract": contract, "layout": layout}
    return Link(sections, draw(st.integers(1, 4)))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=st.lists(links(), min_size=2, max_size=7))
def test_any_chain_of_settings_delivers_every_target_once(tmp_path: Path, chain: list[Link]) -> None:
    """A few steps with each, the last to the end. Inside a window, settings stay until windows meet."""
    sources = two_sources(tmp_path)
    found, snapshot = Counter[Pair](), None
    for number, link in enumerate(chain):
        plan = make_plan(tmp_path, sources, **link.sections)
        pipeline = Pipeline(plan, inline_engine(plan))
        said = pipeline.restore(snapshot)
        assert all(f"step {pipeline.step} on" in line for line in said)
        made, last = list[FramedStep](), number + 1 == len(chain)
        while last or len(made) < link.steps or len(made) % plan.window.steps:
            step = pipeline.next_step()
            if step is None:
                break
            made.append(step)
            snapshot = step.snapshot
        found += delivered(made, plan)
    paths = [path for folder in ("long", "short") for path in sorted((tmp_path / folder).iterdir())]
    assert found == stored_pairs(paths)


def two_sources(base: Path) -> dict[str, dict[str, object]]:
    if (base / "long").exists():
        return {name: {"shards": f"{name}/part-*.tar", "over_length": "split"} for name in ("long", "short")}
    write_source(base / "long", random_lengths(5, 2, 6, longest=400))
    write_source(base / "short", random_lengths(6, 2, 9, longest=40), first=20_000)
    return two_sources(base)


def test_more_lengths_than_a_snapshot_tells_are_refused_until_steps_are_made(tmp_path: Path) -> None:
    """All while one lookahead waits: each resume makes one step of one pack of hundreds."""
    write_source(tmp_path / "docs", [[2] * 999])
    sources: dict[str, dict[str, object]] = {"docs": {"shards": "docs/part-*.tar", "over_length": "split"}}

    def plan(length: int) -> StreamPlan:
        contract = {"seq_length": length, "global_batch_size": 1}
        return make_plan(tmp_path, sources, contract=contract, packing={"lookahead": 400 // length + 1})

    snapshot, found = None, Counter[Pair]()
    for number in range(CUT_LENGTHS_LIMIT):
        here = plan(8 + number % 2)
        pipeline = Pipeline(here, inline_engine(here))
        pipeline.restore(snapshot)
        step = pipeline.next_step()
        assert step is not None
        snapshot = step.snapshot
        found += delivered([step], here)
    assert snapshot is not None
    last = 8 + (CUT_LENGTHS_LIMIT - 1) % 2
    with pytest.raises(
        ContractError, match=rf"cut at {CUT_LENGTHS_LIMIT} lengths .*the last of them {last} slots; make some"
    ):
        resumed(plan(20), snapshot)
    pipeline, _ = resumed(plan(last), snapshot)
    steps = [step for step, _ in zip(iter(pipeline.next_step, None), range(60), strict=False)]
    found += delivered(steps, plan(last))
    pipeline, _ = resumed(plan(20), steps[-1].snapshot)
    found += delivered(list(iter(pipeline.next_step, None)), plan(20))
    assert found == stored_pairs(sorted((tmp_path / "docs").iterdir()))


# The bound of a snapshot -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_as_much_is_drawn_ahead_as_a_snapshot_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Short samples by the hundred in a long lookahead: the lookahead ends, and nothing else changes."""
    write_source(tmp_path / "docs", random_lengths(3, 3, 60, longest=12))
    sources: dict[str, dict[str, object]] = {"docs": {"shards": "docs/part-*.tar"}}
    plan = make_plan(tmp_path, sources, **changed(MODES[mode], {}, packing={"lookahead": 64}))
    monkeypatch.setattr(replay_log, "PIECES_LIMIT", 30)
    monkeypatch.setattr(replay_log, "REPLAY_POINT_EVERY", 4)
    whole = run_plan(plan)
    assert delivered(whole, plan) == stored_pairs(sorted((tmp_path / "docs").iterdir()))
    for step in whole:
        pieces = int.from_bytes(step.snapshot[20:24], "little")
        assert pieces <= 30
        assert run_plan(plan, step.snapshot) == whole[step.step + 1 :]


def test_a_shorter_length_that_makes_more_pieces_than_a_snapshot_tells_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = over_long_source(tmp_path)
    snapshot = run_plan(make_plan(tmp_path, sources, packing={"lookahead": 8}), limit=1)[0].snapshot
    monkeypatch.setattr(replay_log, "PIECES_LIMIT", 60)
    with pytest.raises(
        ContractError, match=r"at seq_length=8 the samples drawn .* at most 60; resume with a longer one"
    ):
        resumed(make_plan(tmp_path, sources, contract={"seq_length": 8}), snapshot)


# Changes asked for by name ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.written(tmp_path_factory.mktemp("corpus"))


CHANGES: dict[str, Sections] = {
    "mixture": {"of_each": {"epochs": 3}, "mixing": {"by": "samples"}},
    "over_length": {"of_each": {"over_length": "split"}},
    "date": {"date": "2026-01-02"},
    "rendering": {"of_each": {"format": "tokens"}},
}


def asked_for(error: pytest.ExceptionInfo[ContractError]) -> list[str]:
    """The changes of the configuration line that an error proposes."""
    _, _, line = str(error.value).partition("resume: {allow_changes: [")
    return line.partition("]")[0].split(", ")


@pytest.mark.parametrize("part", CHANGES)
def test_a_change_goes_on_when_asked_for_as_the_refusal_says(corpus: Corpus, part: str) -> None:
    """Nothing is lost, and no more is repeated than was drawn since the snapshot's order."""
    old, changes = corpus.plan(), CHANGES[part]
    whole = run_plan(old)
    pairs = stored_pairs([*corpus.shards["docs"], *corpus.shards["chat"]])
    for step in spread(whole[:-1]):
        with pytest.raises(ContractError, match=f"these differ: {part};") as error:
            resumed(corpus.plan(**changes), step.snapshot)
        allow = {"allow_changes": asked_for(error)}
        new = corpus.plan(**changes, resume=allow)
        pipeline, said = resumed(new, step.snapshot)
        assert said[0].startswith(f"from step {step.step + 1} on {part} differs from the checkpoint's, as allowed: ")
        assert "are drawn again" in said[1]
        rest = list(iter(pipeline.next_step, None))
        found = delivered(whole[: step.step + 1], old) + delivered(rest, new)
        assert not pairs - found
        assert rest[0].step == step.step + 1
        for later in spread(rest, 3):
            again, said = resumed(new, later.snapshot)
            assert said == ()
            assert list(iter(again.next_step, None)) == rest[later.step - step.step :]


def test_a_document_that_was_half_delivered_is_delivered_again_as_a_whole(tmp_path: Path) -> None:
    """Where nobody can tell what its ids were, all of it waits."""
    sources = over_long_source(tmp_path)
    old = make_plan(tmp_path, sources, contract={"packing": "concat"})
    for step in run_plan(old)[:-1]:
        with pytest.raises(ContractError) as error:
            resumed(make_plan(tmp_path, sources, contract={"packing": "concat"}, date="2026-01-02"), step.snapshot)
        resume = {"allow_changes": asked_for(error)}
        new = make_plan(tmp_path, sources, contract={"packing": "concat"}, date="2026-01-02", resume=resume)
        pipeline, _ = resumed(new, step.snapshot)
        planned = pipeline.next_planned_step()
        assert planned is not None
        piece = planned.micro_batches[0].pieces[0]
        assert piece.begin == piece.block.offsets[piece.sample]
        rest = list(iter(pipeline.next_step, None))
        assert run_plan(new, planned.snapshot) == rest


def test_a_permission_is_for_one_change_only(corpus: Corpus) -> None:
    """It names what the part was before: another change of the same part is refused, and other parts are."""
    snapshot = run_plan(corpus.plan(), limit=2)[-1].snapshot
    with pytest.raises(ContractError) as error:
        resumed(corpus.plan(date="2026-01-02"), snapshot)
    resume = {"allow_changes": asked_for(error)}
    resumed(corpus.plan(date="2026-03-04", resume=resume), snapshot)
    other = run_plan(corpus.plan(date="2025-05-05"), limit=2)[-1].snapshot
    with pytest.raises(ContractError, match="these differ: date;"):
        resumed(corpus.plan(date="2026-01-02", resume=resume), other)
    with pytest.raises(ContractError, match="these differ: mixture;"):
        resumed(corpus.plan(date="2026-01-02", of_each={"epochs": 2}, resume=resume), snapshot)


def test_a_stream_that_has_ended_goes_on_when_its_epochs_are_raised(corpus: Corpus) -> None:
    old = corpus.plan()
    end = run_plan(old)[-1]
    with pytest.raises(ContractError, match="these differ: mixture;") as error:
        resumed(corpus.plan(of_each={"epochs": 2}), end.snapshot)
    new = corpus.plan(of_each={"epochs": 2}, resume={"allow_changes": asked_for(error)})
    pipeline, _ = resumed(new, end.snapshot)
    paths = [*corpus.shards["docs"], *corpus.shards["chat"]]
    assert not stored_pairs(paths) - delivered(list(iter(pipeline.next_step, None)), new)


def test_epochs_below_those_begun_are_refused(corpus: Corpus) -> None:
    old = corpus.plan(of_each={"epochs": 3})
    late = run_plan(old)[-3]
    with pytest.raises(ContractError) as error:
        resumed(corpus.plan(), late.snapshot)
    with pytest.raises(ProtocolError, match="is outside its shards and epochs"):
        resumed(corpus.plan(resume={"allow_changes": asked_for(error)}), late.snapshot)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"loading": {"workers": 0, "block_bytes": 900}}], ids=str)
def test_where_the_order_differs_sources_begin_anew(corpus: Corpus, changes: Sections) -> None:
    snapshot = run_plan(corpus.plan(), limit=3)[-1].snapshot
    with pytest.raises(ContractError) as error:
        resumed(corpus.plan(**changes), snapshot)
    new = corpus.plan(**changes, resume={"allow_changes": asked_for(error)})
    pipeline, said = resumed(new, snapshot)
    assert len(said) == 1
    assert "every source begins its data anew" in said[0]
    assert pipeline.step == 3
    begun = run_plan(new)
    assert [rows_by_step([step], new) for step in iter(pipeline.next_step, None)] == [
        rows_by_step([step], new) for step in begun
    ]


def test_inside_a_window_nothing_may_change(corpus: Corpus) -> None:
    packing = {"window": 2}
    snapshots = [step.snapshot for step in run_plan(corpus.plan(packing=packing), limit=2)]
    with pytest.raises(ContractError) as error:
        resumed(corpus.plan(packing=packing, date="2026-01-02"), snapshots[0])
    new = corpus.plan(packing=packing, date="2026-01-02", resume={"allow_changes": asked_for(error)})
    with pytest.raises(
        ContractError, match=r"step 1 is inside a window of steps 0 … 1, and date may not change there; "
    ):
        resumed(new, snapshots[0])
    resumed(new, snapshots[1])


def test_a_mixture_that_changes_lets_nobody_catch_up(tmp_path: Path) -> None:
    """Half and half, then nine to one: the next samples are nine to one, not all of one source."""
    for number, name in enumerate(("a", "b")):
        write_source(tmp_path / name, [[9] * 900], first=1 + 10_000 * number)

    def plan(weight: float, **sections: Any) -> StreamPlan:
        weights = {"a": weight, "b": 1.0}
        sources: dict[str, dict[str, object]] = {
            name: {"shards": f"{name}/part-*.tar", "weight": weights[name]} for name in weights
        }
        return make_plan(tmp_path, sources, **sections)

    snapshot = run_plan(plan(1.0), limit=20)[-1].snapshot
    with pytest.raises(ContractError) as error:
        resumed(plan(9.0), snapshot)
    new = plan(9.0, resume={"allow_changes": asked_for(error)})
    pipeline, _ = resumed(new, snapshot)
    first = [step for step, _ in zip(iter(pipeline.next_step, None), range(10), strict=False)]
    of_b = sum(count for (one, _), count in delivered(first, new).items() if one > 10_000)
    assert 0.08 < of_b / delivered(first, new).total() < 0.12
