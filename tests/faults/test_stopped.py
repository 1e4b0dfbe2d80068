"""Processes that stand still: nothing is lost when they go on, and until then the others know whom they wait for."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packhorse.wire.messages import Batch, ErrorCode, ServerError, Wait, WaitReason
from tests.faults.job import Job, job_of
from tests.faults.processes import Launcher
from tests.faults.relay import Seen
from tests.faults.truth import Truth, write_feed
from tests.harness import wait_until
from tests.service.corpus import write_shard

WIDE = 32_768  # slots of a row: a window of such rows is more than a connection holds
FULL = 1 << 20  # bytes


def waits_for_rank_one(seen: Seen) -> bool:
    match seen.message:
        case Wait(reason=WaitReason.SLOW_READERS, ranks=ranks):
            return seen.rank == 0 and any("rank 1" in name for name in ranks)
    return False


def is_told_to_rejoin(seen: Seen) -> bool:
    return isinstance(seen.message, ServerError) and seen.message.code is ErrorCode.REJOIN


def test_a_server_that_stands_still_until_its_readers_give_up_the_connection(job: Job) -> None:
    job.start("--delay", "0.01")
    job.wait_taken(9)
    first = {rank: relay.link for rank, relay in job.relays.items()}
    job.server.signal(signal.SIGSTOP)
    wait_until(lambda: not any(link.alive for link in first.values()), "the end of the connections")
    job.server.signal(signal.SIGCONT)
    job.finish()


def test_a_server_that_stands_still_for_a_moment(job: Job) -> None:
    """What was sent before is still handed out, and no connection breaks."""
    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.server.signal(signal.SIGSTOP)
    taken = [-1]

    def nothing_moves() -> bool:
        taken.append(sum(tap.taken() for tap in job.taps))
        return len(taken) > 30 and len(set(taken[-30:])) == 1

    wait_until(nothing_moves, "the end of what was sent")
    job.server.signal(signal.SIGCONT)
    job.finish()
    assert [len(relay.links) for relay in job.relays.values()] == [1, 1]


@pytest.mark.parametrize("noticed", [waits_for_rank_one, is_told_to_rejoin], ids=["for a moment", "for long"])
def test_a_rank_that_stands_still_is_waited_for(job: Job, noticed: Callable[[Seen], bool]) -> None:
    """For a moment: the others are told whom. For long: they look for it where the name points, and it is there."""
    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.taps[1].signal(signal.SIGSTOP)
    job.wire.hold(noticed)
    job.wire.release()
    job.taps[1].signal(signal.SIGCONT)
    job.finish()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """A few steps of many wide rows."""
    folder = tmp_path_factory.mktemp("wide")
    ids = np.random.default_rng(0).integers(1, 60_000, (20, 8 * WIDE)).tolist()
    write_shard(folder / "part.tar", {str(i): of_sample for i, of_sample in enumerate(ids)})
    contract = {"seq_length": WIDE, "global_batch_size": 32, "packing": "concat", "isolate_documents": False}
    config = write_feed(folder, contract=contract, sources={"wide": {"shards": "part.tar"}})
    return Truth.of(config, Counter())


def unread_bytes(endpoint: str) -> int:
    """What waits in the kernel to leave from this port: full where the other end does not read."""
    port = int(endpoint.rpartition(":")[2])
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return max((int(queues.partition(":")[0], 16) for _, at, _, _, queues, *_ in lines if at.endswith(f":{port:04X}")))


def test_a_rank_that_stands_still_behind_a_full_pipe(wide: Truth, launcher: Launcher, tmp_path: Path) -> None:
    """No heartbeat gets through to it. The other is sent away and comes back; what waits here arrives in order."""
    trainer = tmp_path / "trainer.yaml"
    trainer.write_text("window: 256\n")
    with job_of(wide, launcher) as job:
        job.start("--trainer", str(trainer))
        job.wire.hold(lambda seen: seen.rank == 1 and isinstance(seen.message, Batch))
        job.taps[1].signal(signal.SIGSTOP)
        job.wire.release()
        wait_until(lambda: unread_bytes(job.server.endpoint) > FULL, "a full pipe")
        job.wire.hold(is_told_to_rejoin)
        job.wire.release()
        job.taps[1].signal(signal.SIGCONT)
        job.finish()
