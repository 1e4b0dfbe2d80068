"""What the coordinator and its worker processes tell each other: one JSON object a line, over pipes.

Times are seconds of the machine's monotonic clock, which all its processes share. Counts only grow; what a
``WorkerProgress`` says of waits is what came since the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout

__all__ = [
    "Command",
    "Connect",
    "Job",
    "Leave",
    "Measure",
    "RankResult",
    "Ready",
    "Report",
    "WorkerProgress",
    "WorkerResult",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a worker, told first: which ranks to be, of which job, at which pace."""

    kind: Literal["job"] = "job"
    endpoint: str
    key_file: str | None  # of all ranks, where the server has keys
    layout: ParallelLayout
    contract: BatchContract
    ranks: tuple[int, ...]
    counted: tuple[int, ...]  # of these, whose tokens count: one of each data-parallel coordinate
    consume_s: float
    jitter: float  # share of ``consume_s`` that a think time may be shorter or longer
    slow: tuple[int, ...]
    slow_factor: float
    stopped: tuple[int, ...]
    seed: int
    window: int
    verify: bool
    orderly: bool  # whether ranks say BYE when they leave before the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Command to a worker that is ready: connect all ranks."""

    kind: Literal["connect"] = "connect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Command to a worker whose ranks have all taken a micro-batch: what is taken between the two moments counts.

    Ranks that shall stop take nothing from ``stop_s`` until ``resume_s``.
    """

    kind: Literal["measure"] = "measure"
    from_s: float
    until_s: float
    stop_s: float
    resume_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Command to a worker: end now, and tell what you have."""

    kind: Literal["leave"] = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Report of a worker: everything is loaded, nothing is connected."""

    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """Report of a worker, several times a second: how far its ranks are."""

    kind: Literal["progress"] = "progress"
    at_s: float
    connected: int
    welcomed: int  # ranks whose handshake is done
    started: int  # ranks that have taken a micro-batch
    ended: int  # ranks that have taken the end of the stream
    failed: int
    waiting: int  # ranks that ask for a micro-batch which is not there
    micro_batches: int
    tokens: int  # distinct ones
    wire_bytes: int
    waits: Mapping[int, int]  # bins of ``waits.WaitHistogram`` -> how many, since the last
    waiting_for: Mapping[str, int]  # what or whom the server said -> milliseconds of waiting ranks, so far


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """Counts of what one rank took while it was measured, and how long it waited for it."""

    rank: int
    micro_batches: int
    waits: Mapping[int, int]
    wait_s: float
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """Report of a worker, once, when its time is over: what was taken between the moments of ``Measure``."""

    kind: Literal["result"] = "result"
    ranks: tuple[RankResult, ...]
    stopped_waits: Mapping[int, int]  # of waits that overlap a stop that was asked for; not in ``ranks``
    max_stopped_wait_s: float
    micro_batches: int
    fillers: int
    tokens: int  # distinct ones, without fillers
    delivered_tokens: int  # of every rank's slice
    wire_bytes: int
    verified: int  # whole rows whose digest was computed again
    num_microbatches: int  # of one rank in a step; 0 where no handshake was done
    last_taken_s: float
    welcomed_s: float | None  # when the last of its handshakes was done
    first_taken_s: float | None  # when the first micro-batch of all was taken
    all_taken_s: float | None  # when the last of its ranks took its first
    late: Mapping[int, int]  # how late the worker itself was with what its ranks were to do, as bins of waits
    ended: int  # ranks that have taken the end of the stream
    disconnects: int
    errors: Mapping[str, int]  # by kind
    examples: Mapping[str, str] = field(default_factory=dict)  # kind -> the message of the first
    waiting_for: Mapping[str, int] = field(default_factory=dict)


Command = Job | Connect | Measure | Leave
Report = Ready | WorkerProgress | WorkerResult

COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
REPORTS: TypeAdapter[Report] = TypeAdapter(Report)
