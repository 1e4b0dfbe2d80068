"""The suite itself is tested: a one-line fault in a copy of the code makes it fail.

Without a fault the same scenarios pass: see ``test_network`` and ``test_two_servers``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.job import Job, job_of
from tests.faults.processes import ROOT, launching
from tests.faults.scenarios import cut_then_killed, one_rank_lags, zombie_of_an_older_attempt
from tests.faults.truth import Truth


@dataclass(frozen=True)
class Fault:
    """One line of one module, and what stands there instead."""

    module: str
    line: str
    instead: str
    said: str  # a pattern of how it shows: it is noticed for itself, not because the copy does not run
    scenario: Callable[[Job], None] = cut_then_killed

    def copy_into(self, folder: Path) -> Path:
        """A copy of the source tree with this fault."""
        for root in ("client", "service"):
            shutil.copytree(ROOT / root, folder / root, ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / self.module
        source = path.read_text()
        assert source.count(self.line) == 1, f"{self.module} has {source.count(self.line)} times: {self.line}"
        path.write_text(source.replace(self.line, self.instead))
        return folder


FAULTS = {
    "no replay": Fault(
        "service/packhorse_service/protocol/hello_handler.py",
        "reader.sent, reader.heard_s, reader.said_bye = hello.position, now, False",
        "reader.heard_s, reader.said_bye = now, False",
        "stall_timeout",
    ),
    "acknowledgement off by one": Fault(
        "service/packhorse_service/protocol/delivery.py",
        "readers.acknowledge(reader, message.position)",
        "readers.acknowledge(reader, message.position.after(self.sender.num_microbatches))",
        r"stands at \(",
    ),
    "attempt not checked": Fault(
        "service/packhorse_service/protocol/rendezvous.py",
        "self._resuming.setdefault(hello.attempt, {})",
        "self._resuming.setdefault(next(iter(self._resuming), hello.attempt), {})",
        # The other rank ends, or is left without rows.
        r"WELCOME to another attempt|rank 1 \(.*: not connected|stall_timeout",
        zombie_of_an_older_attempt,
    ),
    "low watermark ignored": Fault(
        "service/packhorse_service/protocol/readers.py",
        "self.low_watermark = min(counts)",
        "self.low_watermark = max(counts)",
        "stall_timeout",  # the other runs away, and what this one needs next is dropped
        one_rank_lags,
    ),
    "snapshot one sample late": Fault(
        "service/packhorse_service/mixing/replay_log.py",
        "np.frombuffer(bytes(self.packed), np.uint8)",
        r'np.frombuffer(bytes(self.packed).replace(b"\0", b"\1", 1), np.uint8)',
        "REPLAY_DIVERGED",
    ),
    "skipped samples not replayed": Fault(
        "service/packhorse_service/mixing/sample_stream.py",
        "pending = [piece for piece in pieces if not log.packed[piece.number]]",
        "pending = list[Piece]()",
        "REPLAY_DIVERGED",
    ),
}


@pytest.fixture(scope="module")
def outcomes(short: Truth, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each fault's scenario said; three run at a time, most of which wait."""

    def outcome(name: str) -> str:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        tree = FAULTS[name].copy_into(folder / "tree")
        with launching(folder / "run", tree) as launcher, job_of(short, launcher) as job:
            try:
                FAULTS[name].scenario(job)
            except AssertionError as error:
                return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(FAULTS, pool.map(outcome, FAULTS), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(outcomes: Mapping[str, str], name: str) -> None:
    assert re.search(FAULTS[name].said, outcomes[name])
