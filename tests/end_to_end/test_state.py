"""A feed's state in a checkpoint, across real server processes: nothing is lost, nothing comes twice."""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from packhorse import ContractError, Feed, MicroBatch, PackhorseError, ParallelLayout, ServerFailed
from packhorse.protocol.checkpoint_state import seal_state
from tests.harness import DEADLINE_S, reading, running_server, write_config

CONTRACT = {"seq_length": 256, "global_batch_size": 4, "vocab_size": 1000}
STEP = 4  # micro-batches of a step at data-parallel size 1


def config_of(folder: Path, **settings: Any) -> Path:
    defaults: dict[str, Any] = {"contract": CONTRACT, "sources": {"a": {"shards": "a-*.tar"}}}
    return write_config(folder, **{**defaults, **settings})


def computed(micro_batches: Iterator[MicroBatch]) -> list[bytes]:
    return [mb.computed_digest() for mb in micro_batches]


def take(feed: Feed, count: int) -> None:
    assert len(list(itertools.islice(feed, count))) == count


@pytest.fixture
def undisturbed(token_shards: Path) -> list[bytes]:
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        return computed(feed)


def json_round_trip(state: dict[str, object]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def torch_round_trip(state: dict[str, object]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("taken", [0, 3 * STEP, 3 * STEP + 1, 2], ids=["start", "boundary", "inside", "first step"])
@pytest.mark.parametrize("round_trip", [json_round_trip, torch_round_trip])
def test_the_rest_is_the_same_from_the_same_server_and_from_a_fresh_one(
    token_shards: Path, undisturbed: list[bytes], taken: int, round_trip: Callable[[dict[str, object]], dict[str, Any]]
) -> None:
    config = config_of(token_shards)
    with running_server(config) as server:
        with reading(server.endpoint) as feed:
            take(feed, taken)
            state = round_trip(feed.state_dict())
        assert state["position"] == [taken // STEP, taken % STEP]
        with reading(server.endpoint) as feed:
            feed.load_state_dict(state)
            assert computed(feed) == undisturbed[taken:]
    with running_server(config) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(state)
        assert computed(feed) == undisturbed[taken:]


def test_a_state_can_be_saved_again_at_any_later_place(token_shards: Path, undisturbed: list[bytes]) -> None:
    """From one server process to the next, a few micro-batches each."""
    config = config_of(token_shards)
    digests: list[bytes] = []
    state: dict[str, object] = {}
    while len(digests) < len(undisturbed):
        with running_server(config) as server, reading(server.endpoint) as feed:
            if state:
                feed.load_state_dict(state)
            digests += computed(itertools.islice(feed, 7))
            state = feed.state_dict()
    assert digests == undisturbed


def test_the_step_before_the_last_taken_is_still_held(token_shards: Path, undisturbed: list[bytes]) -> None:
    """A loop that collects a step before it trains it saves the boundary it has trained to."""
    config = config_of(token_shards)
    with running_server(config) as server, reading(server.endpoint) as feed:
        take(feed, 6 * STEP)
        states = {step: feed.state_dict(step=step) for step in (5, 6)}
        assert states[6] == feed.state_dict()
        for step in (2, 7):  # 3 may still be held: it is, where the loop was slower than what arrived
            with pytest.raises(ContractError, match=rf"no state before step {step} is held.*5, 6"):
                feed.state_dict(step=step)
        feed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        with reading(server.endpoint) as resumed:
            resumed.load_state_dict(states[5])
            assert computed(resumed) == undisturbed[5 * STEP :]


def test_a_state_saved_at_the_end_ends_at_once(token_shards: Path, undisturbed: list[bytes]) -> None:
    config = config_of(token_shards)
    with running_server(config) as server, reading(server.endpoint) as feed:
        assert computed(feed) == undisturbed
        state = feed.state_dict()
        assert list(feed) == []
    with running_server(config) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(state)
        assert list(feed) == []
        assert feed.state_dict() == state


def test_iterating_again_goes_on(token_shards: Path, undisturbed: list[bytes]) -> None:
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        parts = [computed(itertools.islice(iter(feed), 5)), computed(iter(feed))]
    assert parts == [undisturbed[:5], undisturbed[5:]]


def test_all_ranks_resume_from_one_copy(token_shards: Path) -> None:
    layout = ParallelLayout(data=2)
    config = config_of(token_shards, layout={"data": 2})

    def run(endpoint: str, rank: int, loads: dict[str, object] | None) -> tuple[list[bytes], dict[str, object]]:
        with reading(endpoint, layout=layout, rank=rank) as feed:
            if loads:
                feed.load_state_dict(loads)
            first = computed(itertools.islice(feed, 3 * STEP // 2))
            state = feed.state_dict()
            return first + computed(feed), state

    def both(loads: dict[str, object] | None) -> list[tuple[list[bytes], dict[str, object]]]:
        with running_server(config) as server, ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, [server.endpoint] * 2, range(2), [loads] * 2))

    whole = both(None)
    assert whole[0][1] == whole[1][1]
    for (digests, _), (resumed, _) in zip(whole, both(whole[0][1]), strict=True):
        assert resumed == digests[3 * STEP // 2 :]


@pytest.mark.parametrize("packing", [{}, {"window": 3}], ids=["a step alone", "inside a window"])
def test_a_boundary_resumes_on_another_data_parallel_size(token_shards: Path, packing: dict[str, int]) -> None:
    """The same packs, dealt to other ranks; inside a step that is refused."""
    layout = ParallelLayout(data=2)
    with running_server(config_of(token_shards, packing=packing)) as server, reading(server.endpoint) as feed:
        take(feed, 5 * STEP)
        boundary = feed.state_dict()
        rest = sorted(mb.tokens.tobytes() for mb in feed if not mb.filler)
    inside = seal_state({**boundary, "position": [5, 1]})

    def run(endpoint: str, rank: int, state: dict[str, object]) -> list[MicroBatch]:
        with reading(endpoint, layout=layout, rank=rank) as feed:
            feed.load_state_dict(state)
            return list(feed)

    config = config_of(token_shards, layout={"data": 2}, packing=packing)
    with running_server(config) as server, ThreadPoolExecutor(2) as pool:
        found = [mb for mbs in pool.map(run, [server.endpoint] * 2, range(2), [boundary] * 2) for mb in mbs]
    assert sorted(mb.tokens.tobytes() for mb in found if not mb.filler) == rest
    with running_server(config) as server, ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, server.endpoint, rank, inside) for rank in range(2)]
        for future in futures:
            with pytest.raises(ContractError, match=r"inside a step, at \(5, 1\).*boundary"):
                future.result()


def test_inside_a_window_another_window_is_refused_with_the_steps_where_windows_meet(token_shards: Path) -> None:
    with running_server(config_of(token_shards, packing={"window": 3})) as server, reading(server.endpoint) as feed:
        take(feed, 5 * STEP)
        inside, beginning = feed.state_dict(), feed.state_dict(step=4)
    with running_server(config_of(token_shards, packing={"window": 2})) as server:
        for state in (inside, beginning):
            with reading(server.endpoint) as feed:
                feed.load_state_dict(state)
                with pytest.raises(ServerFailed, match="step 3 or 6, where windows meet"):
                    next(feed)


# As saved before step 5; only its form matters.
GOOD: dict[str, object] = seal_state(
    {
        "version": 3,
        "stream": "train",
        "position": [5, 0],
        "fingerprint": "00" * 16,
        "snapshot": "c25hcHNob3Q=",
        "further": [["validation", [0, 0], "", ""]],
    }
)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"version": 2}, "version=2 is not known here, must be 3"),
        ({"version": 4}, "version=4"),
        ({"stream": "validation"}, "'validation'.*'train'"),
        ({"position": [5]}, "position"),
        ({"position": [-1, 0]}, "position"),
        ({"position": "5"}, "position"),
        ({"position": [0, 0]}, "snapshot of 8 bytes does not fit step 0"),
        ({"snapshot": ""}, "snapshot of 0 bytes does not fit step 5"),
        ({"snapshot": "not base64!"}, "base64"),
        ({"snapshot": 7}, "base64"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"fingerprint": "00"}, "fingerprint"),
        ({"extra": 1}, "unknown: extra"),
        ({"further": "validation"}, "further='validation' must be a list"),
        (
            {"further": [["validation", [0, 0]]]},
            r"further=\['validation', .* must be lists of stream, position",
        ),
        ({"further": [[3, [0, 0], "", ""]]}, "stream=3 must be a name"),
        ({"further": [["validation", [4, 0], "00" * 16, ""]]}, "stream 'validation': snapshot of 0 bytes"),
        ({"further": [["train", [0, 0], "", ""]]}, "names a stream twice: train, train"),
    ],
    ids=str,
)
def test_a_state_that_is_damaged_or_foreign_is_refused(changed: dict[str, object], named: str) -> None:
    with reading("tcp://127.0.0.1:9") as feed, pytest.raises(ContractError, match=named):
        feed.load_state_dict(seal_state({**GOOD, **changed}))


@pytest.mark.parametrize(
    "changed",
    [
        {"position": [5, 1]},
        {"position": [6, 0]},
        {"position": [5.0, 0]},
        {"position": [True, 0]},
        {"fingerprint": "01" + "00" * 15},
        {"snapshot": "c25hcHNob3U="},
        {"snapshot": b"c25hcHNob3Q="},
        {"further": []},
        {"further": [["validation", [0, 1], "", ""]]},
        {"digest": "00" * 16},
        {"digest": None},
    ],
    ids=str,
)
def test_a_state_whose_parts_are_not_those_that_were_saved_together_is_refused(changed: dict[str, object]) -> None:
    with reading("tcp://127.0.0.1:9") as feed, pytest.raises(ContractError, match=r"is damaged|holds what no state"):
        feed.load_state_dict({**GOOD, **changed})


def test_a_state_inside_a_step_begins_that_step_again_where_it_is_asked_to(token_shards: Path) -> None:
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        took = list(itertools.islice(feed, 5 * STEP + 2))
        inside = feed.state_dict()
        assert inside["position"] == [5, 2]
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(inside, repeat_step=True)
        again = list(itertools.islice(feed, 2))
    assert [(mb.position, mb.tokens.tobytes()) for mb in again] == [
        (mb.position, mb.tokens.tobytes()) for mb in took[-2:]
    ]


def test_an_empty_state_and_none_are_refused() -> None:
    with reading("tcp://127.0.0.1:9") as feed:
        with pytest.raises(ContractError, match="is empty"):
            feed.load_state_dict({})
        with pytest.raises(ContractError, match="must be a mapping, got list"):
            feed.load_state_dict([])  # type: ignore[arg-type]
        feed.load_state_dict(GOOD)
        with pytest.raises(ContractError, match="loaded once"):
            feed.load_state_dict(GOOD)


def test_a_state_after_the_first_micro_batch_is_refused(token_shards: Path) -> None:
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        take(feed, 1)
        with pytest.raises(ContractError, match="before the first micro-batch"):
            feed.load_state_dict(GOOD)


def test_a_state_of_other_data_is_refused_by_the_server(token_shards: Path, tmp_path: Path) -> None:
    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        take(feed, 5 * STEP)
        state = feed.state_dict()
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(token_shards / "a-000000.tar", other)
    with running_server(config_of(other)) as server, reading(server.endpoint) as feed:
        feed.load_state_dict(state)
        with pytest.raises(ServerFailed, match="manifest"):
            next(feed)


def test_a_feed_in_a_forked_process_raises(token_shards: Path) -> None:
    """As in the worker of a DataLoader."""

    def use(feed: Feed, answer: Any) -> None:
        try:
            next(feed)
        except PackhorseError as error:
            answer.send(str(error))

    with running_server(config_of(token_shards)) as server, reading(server.endpoint) as feed:
        take(feed, 1)
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=use, args=(feed, theirs))
        worker.start()
        worker.join(DEADLINE_S)
        assert ours.poll(0)
        assert "forked" in ours.recv()
