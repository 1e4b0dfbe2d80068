"""Ranks and loaders are killed: the job begins again from a checkpoint, a block is loaded again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from packhorse.wire.messages import Wait, WaitReason
from tests.faults.job import Job, job_of
from tests.faults.processes import launching
from tests.faults.relay import Seen
from tests.faults.truth import Truth
from tests.harness import wait_until


def test_all_ranks_killed_begin_again_from_their_checkpoint(job: Job) -> None:
    """The server lives on. Rows behind the checkpoint come again, the same ones."""
    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.restart(job.checkpoint(), "--delay", "0.01")
    job.wait_taken(5)
    job.restart(job.checkpoint())
    job.finish()


def test_all_ranks_killed_before_their_first_checkpoint_begin_at_the_start(job: Job) -> None:
    job.start("--delay", "0.2")
    job.wait_taken(1)
    assert job.checkpoint() is None
    job.restart(None)
    job.finish()


def test_one_rank_killed_and_replaced_alone_waits_and_is_named_to_the_others(job: Job) -> None:
    """Nobody is served until the whole job begins again."""

    def named(seen: Seen) -> bool:
        match seen.message:
            case Wait(reason=WaitReason.SLOW_READERS, ranks=ranks):
                return seen.rank == 0 and any("rank 1" in name and "a new process" in name for name in ranks)
        return False

    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.taps[1].kill()
    alone = job.launcher.tap(job.relays[1].endpoint, 1, job.truth.layout, "--resume", str(job.taps[1].state))
    job.wire.hold(named)
    job.wire.release()
    assert alone.alive
    assert not alone.taken()
    alone.kill()
    job.restart(job.checkpoint())
    job.finish()


def test_everything_killed_three_steps_behind_a_checkpoint_is_resumed_from_it(job: Job) -> None:
    job.start("--delay", "0.01")
    job.wait_taken(9)
    checkpoint = job.checkpoint()
    job.wait_taken(9 + 3 * job.truth.num_microbatches)
    job.server.kill()
    for tap in job.taps:
        tap.kill()
    job.lead_to(job.serve())
    job.restart(checkpoint)
    job.finish()


def held_loader(job: Job, faults: Path) -> int:
    """The pid of a loader that is in the middle of a block, and stays there until ``hold`` is gone."""
    (faults / "hold").touch()
    wait_until(lambda: any(faults.glob("held-*")), "a read in a loader")
    (held, *_) = faults.glob("held-*")
    pid = int(held.name.removeprefix("held-"))
    assert pid in job.server.loaders()
    return pid


def waits_for_loading(seen: Seen) -> bool:
    return isinstance(seen.message, Wait) and seen.message.reason is WaitReason.LOADING


def test_a_loader_killed_in_the_middle_of_a_block(slow_disk: Job, faults: Path) -> None:
    slow_disk.start("--delay", "0.01")
    slow_disk.wait_taken(3)
    pid = held_loader(slow_disk, faults)
    os.kill(pid, signal.SIGKILL)
    (faults / "hold").unlink()
    slow_disk.finish()


def test_a_loader_stopped_in_the_middle_of_a_block_is_waited_for(slow_disk: Job, faults: Path) -> None:
    """Its readers are told what is waited for; nobody is given another block instead."""
    slow_disk.start()
    slow_disk.wait_taken(3)
    pid = held_loader(slow_disk, faults)
    os.kill(pid, signal.SIGSTOP)
    (faults / "hold").unlink()
    slow_disk.wire.hold(waits_for_loading)
    slow_disk.wire.release()
    os.kill(pid, signal.SIGCONT)
    slow_disk.finish()


def test_a_read_that_fails_once_is_tried_again(slow_disk: Job, faults: Path) -> None:
    slow_disk.start("--delay", "0.01")
    slow_disk.wait_taken(3)
    (faults / "fail").touch()
    wait_until((faults / "failed").exists, "a read that fails")
    slow_disk.finish()


def test_a_wall_clock_that_jumps_changes_nothing(short: Truth, tmp_path: Path, faults: Path) -> None:
    """In the server, its loaders and the ranks: each look at it tells another day."""
    with (
        launching(tmp_path / "run", FAULTS=str(faults), CLOCK_JUMPS="1") as launcher,
        job_of(short, launcher, short.with_workers(1)) as job,
    ):
        job.start()
        job.finish()
        said = [line.split()[0] for line in job.server.log.read_text().splitlines()]
    assert said != sorted(said)  # the log's own times show that the clock did jump
