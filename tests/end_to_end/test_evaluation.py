"""Evaluation streams through a real server: each pass is over all the data, and training notices nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from packhorse import (
    BatchContract,
    ConfigError,
    ContractError,
    Feed,
    HandshakeRefused,
    MicroBatch,
    PackhorseError,
    ParallelLayout,
    ServerFailed,
)
from tests.harness import DEADLINE_S, running_server, wait_until, write_config
from tests.service.corpus import Pair, damage, pairs_of, random_lengths, row_contents, stored_pairs, write_source

RANKS = 2
LAYOUT = ParallelLayout(data=RANKS)
NUM_MICROBATCHES = 2  # of a rank and step, in both streams
PASSES = 3


@dataclass(frozen=True)
class Data:
    """Shards of both streams, and their configuration."""

    folder: Path
    train: list[Path]
    held_out: list[Path]

    def config(self, *, validation: dict[str, Any] | None = None, **settings: Any) -> Path:
        defaults: dict[str, Any] = {
            "layout": {"data": RANKS},
            "contract": {"seq_length": 64, "global_batch_size": 4, "vocab_size": 60_000, "remainder": "drop"},
            "sources": {"docs": {"shards": "train/*.tar"}},
            "streams": {
                "validation": {
                    "contract": {"seq_length": 128},
                    "sources": {"held_out": {"shards": "held-out/*.tar"}},
                    **(validation or {}),
                }
            },
        }
        return write_config(self.folder, **{**defaults, **settings})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("streams")
    train = write_source(folder / "train", random_lengths(1, 3, 80, longest=60))
    held_out = write_source(folder / "held-out", random_lengths(2, 2, 70, longest=60), first=30_000, masked=True)
    return Data(folder, train, held_out)


@contextlib.contextmanager
def reading(endpoint: str, rank: int = 0, *, layout: ParallelLayout = LAYOUT, **options: Any) -> Iterator[Feed]:
    """A feed that leaves the server running: it crashes rather than says BYE."""
    timeouts = {"start_timeout": DEADLINE_S, "stall_timeout": DEADLINE_S}
    feed = Feed(endpoint, layout=layout, rank=rank, arrays="numpy", **{**timeouts, **options})
    try:
        yield feed
    finally:
        feed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)


Found = TypeVar("Found")


def on_all_ranks(endpoint: str, run: Callable[[Feed], Found], **options: Any) -> list[Found]:
    """What ``run`` gives on every rank, each in a thread of its own."""

    def of_rank(rank: int) -> Found:
        with reading(endpoint, rank, **options) as feed:
            return run(feed)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of_rank, range(RANKS)))


def take(feed: Feed, count: int) -> list[MicroBatch]:
    taken = list(itertools.islice(feed, count))
    assert len(taken) == count
    return taken


def digests(micro_batches: Sequence[MicroBatch]) -> list[bytes]:
    return [mb.computed_digest() for mb in micro_batches]


def contents(micro_batches: Sequence[MicroBatch]) -> list[tuple[bytes, ...]]:
    """Everything but the positions."""
    return [(*row_contents(mb), bytes([mb.filler])) for mb in micro_batches]


def pairs(of_ranks: Iterable[Sequence[MicroBatch]]) -> Counter[Pair]:
    return Counter(pair for of_rank in of_ranks for mb in of_rank for pair in pairs_of(mb))


@dataclass(frozen=True)
class Undisturbed:
    """What each rank is handed where nothing happens."""

    trained: list[list[bytes]]  # [rank]
    passes: list[list[list[bytes]]]  # [rank][pass]


@pytest.fixture(scope="module")
def undisturbed(data: Data) -> Undisturbed:
    def run(feed: Feed) -> tuple[list[bytes], list[list[bytes]]]:
        validation = feed.stream("validation")
        return digests(list(feed)), [digests(list(validation)) for _ in range(PASSES)]

    with running_server(data.config()) as server:
        trained, passes = zip(*on_all_ranks(server.endpoint, run), strict=True)
    return Undisturbed(list(trained), list(passes))


# Passes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "validation",
    [
        {},
        {"packing": {"window": 2, "lookahead": 8}},
        {"contract": {"packing": "in_batch", "micro_batch_size": 2}},
        {"contract": {"global_batch_size": 60}},
    ],
    ids=["as training", "planning windows", "in batch", "a pass of one step"],
)
def test_every_evaluation_between_training_steps_covers_every_target_once(
    data: Data, undisturbed: Undisturbed, validation: dict[str, Any]
) -> None:
    def run(feed: Feed) -> tuple[list[MicroBatch], list[list[MicroBatch]]]:
        evaluation = feed.stream("validation")
        trained, passes = list[MicroBatch](), list[list[MicroBatch]]()
        for _ in range(PASSES):
            trained += take(feed, 3)
            passes.append(list(evaluation))
        return trained + list(feed), passes

    with running_server(data.config(validation=validation)) as server:
        trained, passes = zip(*on_all_ranks(server.endpoint, run), strict=True)
    assert [digests(of_rank) for of_rank in trained] == undisturbed.trained
    stored = stored_pairs(data.held_out)
    assert set(stored.values()) == {1}
    for number in range(PASSES):
        assert pairs(of_rank[number] for of_rank in passes) == stored
    for of_rank in passes:
        first, *others = map(contents, of_rank)
        assert all(other == first for other in others)
        steps = [{mb.step for mb in one} for one in of_rank]
        for before, after in itertools.pairwise(steps):
            assert min(after) == max(before) + 2  # END stands between them
        assert all(one[-1].index == one[-1].num_microbatches - 1 for one in of_rank)


def test_a_job_that_evaluates_leaves_in_order_and_so_does_the_server(data: Data) -> None:
    """Whole steps, and the last evaluation behind the end of training."""

    def run(endpoint: str, rank: int) -> list[int]:
        with Feed(endpoint, layout=LAYOUT, rank=rank, arrays="numpy", start_timeout=DEADLINE_S) as feed:
            validation = feed.stream("validation", contract=BatchContract(seq_length=128))
            passes = [len(list(validation.steps()))]
            for _ in feed.steps():
                pass
            return [*passes, len(list(validation.steps()))]

    with running_server(data.config()) as server, ThreadPoolExecutor(RANKS) as pool:
        steps = list(pool.map(run, [server.endpoint] * RANKS, range(RANKS)))
        assert server.process.wait(DEADLINE_S) == 0
    assert len({count for of_rank in steps for count in of_rank}) == 1


def test_a_job_that_never_evaluates_leaves_the_server_in_order_too(data: Data) -> None:
    with running_server(data.config()) as server, ThreadPoolExecutor(RANKS) as pool:

        def run(rank: int) -> None:
            with Feed(server.endpoint, layout=LAYOUT, rank=rank, arrays="numpy", start_timeout=DEADLINE_S) as feed:
                take(feed, 1)

        list(pool.map(run, range(RANKS)))
        assert server.process.wait(DEADLINE_S) == 0


def loaders(process: subprocess.Popen[str]) -> int:
    """Loader processes of a server."""
    children = itertools.chain.from_iterable(
        path.read_text().split() for path in Path(f"/proc/{process.pid}/task").glob("*/children")
    )
    commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    return sum("spawn_main" in command for command in commands)


def test_a_stream_that_nobody_reads_loads_nothing_and_a_signal_ends_all(data: Data) -> None:
    def run(feed: Feed) -> int:
        take(feed, 1)
        before = loaders(server.process)
        take(feed.stream("validation"), 1)
        return before

    with running_server(data.config()) as server:
        assert on_all_ranks(server.endpoint, run) == [1, 1]
        assert loaders(server.process) == 2
        server.signal_and_wait(signal.SIGTERM)


def test_ranks_evaluate_whatever_the_others_do_in_training(data: Data, undisturbed: Undisturbed) -> None:
    """With a full train window, and with one rank at the end of training and the other one before it."""
    total = len(undisturbed.trained[0])

    def run(feed: Feed) -> list[MicroBatch]:
        validation = feed.stream("validation")
        trained = take(feed, 1)
        wait_until(lambda: len(feed._connection.queue.entries) == 2, "a full train window")
        assert digests(list(validation)) == undisturbed.passes[feed.rank][0]
        trained += list(feed) if feed.rank == 0 else take(feed, total - 2)
        assert digests(list(validation)) == undisturbed.passes[feed.rank][1]
        return trained + list(feed)

    with running_server(data.config()) as server:
        trained = on_all_ranks(server.endpoint, run, window=2)
    assert [digests(of_rank) for of_rank in trained] == undisturbed.trained


def test_a_pass_that_was_left_goes_on_and_an_iterator_stays_at_its_end(data: Data, undisturbed: Undisturbed) -> None:
    def run(feed: Feed) -> tuple[list[bytes], list[bytes], list[bytes]]:
        validation = feed.stream("validation")
        begun = digests(take(validation, 3))
        iterator = iter(validation)
        rest = digests(list(iterator))
        assert list(iterator) == []
        assert feed.stream("validation") is validation
        first, second = validation.chunks(2)
        again = digests([mb for mb, _ in zip(first, second, strict=True)])
        return begun, rest, again

    with running_server(data.config()) as server:
        found = on_all_ranks(server.endpoint, run)
    for rank, (begun, rest, again) in enumerate(found):
        assert begun + rest == undisturbed.passes[rank][0]
        assert again == undisturbed.passes[rank][1]


def test_a_stream_that_was_closed_goes_on_where_it_was_left(data: Data, undisturbed: Undisturbed) -> None:
    def run(feed: Feed) -> list[bytes]:
        found = list[bytes]()
        for count in (3, 4):
            with feed.stream("validation") as validation:
                found += digests(take(validation, count))
        return found + digests(list(feed.stream("validation")))

    with running_server(data.config()) as server:
        assert on_all_ranks(server.endpoint, run) == [of_rank[0] for of_rank in undisturbed.passes]


# What is refused, and what fails ------------------------------------------------------------------------


def test_a_stream_that_is_not_there_is_refused_with_those_that_are(data: Data) -> None:
    with running_server(data.config()) as server:
        with reading(server.endpoint) as feed, pytest.raises(HandshakeRefused) as refused:
            next(feed.stream("vaildation"))
        assert "stream is vaildation, must be one of train, validation" in str(refused.value)
        with reading(server.endpoint, stream="test") as feed, pytest.raises(HandshakeRefused, match="STREAM"):
            next(feed)


def test_another_contract_than_that_of_the_stream_is_refused(data: Data) -> None:
    with running_server(data.config()) as server, reading(server.endpoint) as feed:
        validation = feed.stream("validation", contract=BatchContract(seq_length=64))
        with pytest.raises(HandshakeRefused, match=r"seq_length of rank 0 .* is 64, must be 128"):
            next(validation)


def test_what_a_feed_cannot_open_is_refused_by_name() -> None:
    with reading("tcp://127.0.0.1:9") as feed:
        with pytest.raises(ConfigError, match="'train' is what this Feed reads"):
            feed.stream("train")
        feed.stream("validation", contract=BatchContract(seq_length=64))
        with pytest.raises(ConfigError, match="'validation' is open with another contract"):
            feed.stream("validation", contract=BatchContract(seq_length=128))
        with pytest.raises(ConfigError, match="world size 2"):
            feed.stream("test", layout=ParallelLayout(data=4))
    with pytest.raises(PackhorseError, match="'validation' cannot be opened: this Feed is closed"):
        feed.stream("validation")


def test_data_that_fails_an_evaluation_does_not_end_training(
    data: Data, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    held_out = write_source(tmp_path / "held-out", random_lengths(2, 1, 15, longest=60), first=30_000)
    damage(held_out[0], "0009.npy")
    validation = {"sources": {"held_out": {"shards": str(tmp_path / "held-out" / "*.tar")}}}

    def run(endpoint: str, rank: int) -> list[bytes]:
        with Feed(endpoint, layout=LAYOUT, rank=rank, arrays="numpy", start_timeout=DEADLINE_S) as feed:
            trained = take(feed, 2)
            with pytest.raises(ServerFailed, match="0009"):
                list(feed.stream("validation"))
            return digests(trained + list(feed))

    with running_server(data.config(validation=validation)) as server, ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(run, [server.endpoint] * RANKS, range(RANKS))) == undisturbed.trained
        assert server.process.wait(DEADLINE_S) == 1


def test_data_that_fails_training_ends_evaluations_too(data: Data, tmp_path: Path) -> None:
    train = write_source(tmp_path / "train", random_lengths(1, 3, 80, longest=60))
    damage(train[2], "0050.npy")
    sources = {"docs": {"shards": str(tmp_path / "train" / "*.tar"), "shuffle": False, "open_shards": 1}}

    def run(feed: Feed) -> None:
        validation = feed.stream("validation")
        take(validation, 1)
        with pytest.raises(ServerFailed, match="0050"):
            list(feed)
        with pytest.raises(ServerFailed, match=r"stream 'train' has failed.*0050"):
            list(itertools.chain.from_iterable(itertools.repeat(validation)))

    with running_server(data.config(sources=sources)) as server:
        on_all_ranks(server.endpoint, run)
        assert server.process.wait(DEADLINE_S) == 1


# Killed, and resumed -----------------------------------------------------------------------------------


def test_a_server_killed_in_the_middle_of_evaluations_goes_on_with_them(data: Data, undisturbed: Undisturbed) -> None:
    """Once where both ranks stand at different places of one pass, once where one is a pass ahead."""
    listen = f"ipc://{data.folder}/server"
    size = len(undisturbed.passes[0][0])
    barrier = threading.Barrier(RANKS + 1)

    def run(feed: Feed) -> tuple[list[bytes], list[list[bytes]]]:
        validation = feed.stream("validation")
        trained, found = digests(take(feed, 3)), list[list[bytes]]()
        for one, other in ((2, 5), (size, 4)):
            begun = digests(take(validation, one if feed.rank == 0 else other))
            barrier.wait(DEADLINE_S)  # and the server is killed
            barrier.wait(DEADLINE_S)
            found.append(begun + digests(list(validation)))
        found.append(digests(list(validation)))
        return trained + digests(list(feed)), found

    with contextlib.ExitStack() as servers, ThreadPoolExecutor(1) as pool:
        server = servers.enter_context(running_server(data.config(listen=listen)))
        ranks = pool.submit(on_all_ranks, listen, run)
        for _ in range(2):
            barrier.wait(DEADLINE_S)
            assert server.signal_and_wait(signal.SIGKILL) == -signal.SIGKILL
            server = servers.enter_context(running_server(data.config(listen=listen)))
            barrier.wait(DEADLINE_S)
        trained, passes = zip(*ranks.result(DEADLINE_S), strict=True)
    assert list(trained) == undisturbed.trained
    assert list(passes) == undisturbed.passes


def test_a_server_killed_behind_the_end_of_training_serves_the_last_evaluation(
    data: Data, undisturbed: Undisturbed
) -> None:
    listen = f"ipc://{data.folder}/server"
    barrier = threading.Barrier(RANKS + 1)

    def run(rank: int) -> None:
        with Feed(listen, layout=LAYOUT, rank=rank, arrays="numpy", start_timeout=DEADLINE_S) as feed:
            list(feed)
            validation = feed.stream("validation")
            begun = take(validation, 1)
            barrier.wait(DEADLINE_S)
            barrier.wait(DEADLINE_S)
            assert digests(begun + list(validation)) == undisturbed.passes[rank][0]
            barrier.wait(DEADLINE_S)

    with running_server(data.config(listen=listen)) as server, ThreadPoolExecutor(RANKS) as pool:
        ranks = [pool.submit(run, rank) for rank in range(RANKS)]
        barrier.wait(DEADLINE_S)
        server.signal_and_wait(signal.SIGKILL)
        with running_server(data.config(listen=listen)) as server:
            barrier.wait(DEADLINE_S)
            barrier.wait(DEADLINE_S)
            for rank in ranks:
                rank.result(DEADLINE_S)
            assert server.process.wait(DEADLINE_S) == 0, "all have met it again, and left"


@pytest.mark.parametrize(
    "evaluated", [0, 1, 2 * NUM_MICROBATCHES, "all but the end", "a pass", "a pass and a half"], ids=str
)
def test_a_checkpoint_between_and_inside_evaluations_goes_on_with_the_rest(
    data: Data, undisturbed: Undisturbed, evaluated: int | str
) -> None:
    size = len(undisturbed.passes[0][0])
    whole, further = {
        "all but the end": (0, size),
        "a pass": (1, 0),
        "a pass and a half": (1, size // 2),
    }.get(str(evaluated), (0, int(evaluated) if isinstance(evaluated, int) else 0))

    def before(feed: Feed) -> dict[str, object]:
        take(feed, 2 * NUM_MICROBATCHES)
        validation = feed.stream("validation")
        for _ in range(whole):
            list(validation)
        take(validation, further)
        return json_round_trip(feed.state_dict())

    def after(feed: Feed) -> tuple[list[bytes], list[list[bytes]]]:
        feed.load_state_dict(state)
        assert feed.state_dict() == state, "kept until the stream is opened"
        trained = digests(list(feed))
        validation = feed.stream("validation")
        assert feed.state_dict()["further"] == state["further"]
        return trained, [digests(list(validation)) for _ in range(whole, PASSES)]

    with running_server(data.config()) as server:
        state, *others = on_all_ranks(server.endpoint, before)
    assert others == [state]
    with running_server(data.config()) as server:
        resumed = on_all_ranks(server.endpoint, after)
    for rank, (trained, passes) in enumerate(resumed):
        assert trained == undisturbed.trained[rank][2 * NUM_MICROBATCHES :]
        first, *rest = undisturbed.passes[rank][whole:]
        assert passes == [first[further:], *rest]


def test_an_evaluation_goes_on_at_another_data_parallel_size_from_the_state_of_any_rank(data: Data) -> None:
    taken = 2 * NUM_MICROBATCHES

    def before(feed: Feed) -> tuple[list[MicroBatch], dict[str, object]]:
        if feed.rank == 0:
            feed.stream("test")  # opened on one rank only, and not read
        validation = feed.stream("validation")
        list(validation)
        return take(validation, taken), feed.state_dict()

    streams = {name: {"sources": {"held_out": {"shards": "held-out/*.tar"}}} for name in ("validation", "test")}
    with running_server(data.config(streams=streams)) as server:
        begun, (state, other) = zip(*on_all_ranks(server.endpoint, before), strict=True)
    assert state == other
    one = ParallelLayout()
    with (
        running_server(data.config(streams=streams, layout={"data": 1})) as server,
        reading(server.endpoint, layout=one) as feed,
    ):
        feed.load_state_dict(state)
        validation = feed.stream("validation")
        rest, again = list(validation), list(validation)
    assert pairs([*begun, rest]) == pairs([again]) == stored_pairs(data.held_out)


def test_a_job_of_its_own_can_evaluate_while_nobody_trains(data: Data, undisturbed: Undisturbed) -> None:
    with running_server(data.config()) as server:
        passes = on_all_ranks(server.endpoint, lambda feed: digests(list(feed)), stream="validation")
    assert passes == [of_rank[0] for of_rank in undisturbed.passes]


def json_round_trip(state: dict[str, object]) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(json.dumps(state))
    return loaded


def test_a_stream_that_a_state_does_not_know_begins_at_its_start(data: Data, undisturbed: Undisturbed) -> None:
    with running_server(data.config()) as server:
        state, _ = on_all_ranks(server.endpoint, lambda feed: (take(feed, 2), feed.save_state())[1])
    assert state["further"] == []

    def run(feed: Feed) -> list[bytes]:
        feed.restore_state(state)
        return digests(list(feed.stream("validation")))

    with running_server(data.config()) as server:
        assert on_all_ranks(server.endpoint, run) == [of_rank[0] for of_rank in undisturbed.passes]


def test_a_state_is_loaded_before_any_stream_is_read(data: Data) -> None:
    def run(feed: Feed) -> None:
        state = feed.state_dict()
        take(feed.stream("validation"), 1)
        with pytest.raises(ContractError, match=r"stream 'validation' at .* before the first micro-batch"):
            feed.load_state_dict(state)

    with running_server(data.config()) as server:
        on_all_ranks(server.endpoint, run)


def test_an_open_stream_goes_on_from_a_loaded_state_too(data: Data, undisturbed: Undisturbed) -> None:
    def before(feed: Feed) -> dict[str, object]:
        take(feed.stream("validation"), 5)
        return feed.state_dict()

    def after(feed: Feed) -> list[bytes]:
        validation = feed.stream("validation")
        feed.load_state_dict(state)
        return digests(list(validation))

    with running_server(data.config()) as server:
        state, _ = on_all_ranks(server.endpoint, before)
        assert on_all_ranks(server.endpoint, after) == [of_rank[0][5:] for of_rank in undisturbed.passes]


def test_an_earlier_boundary_holds_the_evaluations_that_were_made_since(data: Data) -> None:
    """The loop reads a step ahead of its training: what it evaluated stays evaluated."""

    def run(feed: Feed) -> tuple[dict[str, object], dict[str, object]]:
        take(feed, 3 * NUM_MICROBATCHES)
        list(feed.stream("validation"))
        return feed.state_dict(step=2), feed.state_dict()

    with running_server(data.config()) as server:
        earlier, now = on_all_ranks(server.endpoint, run)[0]
    assert (earlier["position"], now["position"]) == ([2, 0], [3, 0])
    assert earlier["further"] == now["further"] != []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is what is tested here
def test_the_state_goes_through_a_distributed_checkpoint(data: Data, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """As a Stateful, also into a feed that has not opened the stream of the evaluation yet."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    where = {"checkpoint_id": tmp_path / "checkpoint"}
    one = ParallelLayout()
    config = data.config(layout={"data": 1})
    with running_server(config) as server, reading(server.endpoint, layout=one) as feed:
        validation = feed.stream("validation")
        trained, evaluated = digests(take(feed, 5)), digests(take(validation, 7))
        checkpoint.save({"feed": feed}, **where)
        rest = digests(list(feed)), digests(list(validation))
    with running_server(config) as server, reading(server.endpoint, layout=one) as feed:
        checkpoint.load({"feed": feed}, **where)
        assert feed.position == (5 // 4, 5 % 4)
        assert (digests(list(feed)), digests(list(feed.stream("validation")))) == rest
    assert len(trained) + len(rest[0]) == sum(map(len, undisturbed.trained))
    assert len(evaluated) + len(rest[1]) == sum(len(of_rank[0]) for of_rank in undisturbed.passes)
