"""The status of a server at one moment: what ``/status.json`` says, and all else is made from.

Times are ages in seconds at that moment: clocks of two machines need not agree. Counts are since the server
started. A *cause* (``stalls``) is one word for why a reader has not got what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from packhorse_service.protocol.diagnosis import Cause, ReaderState

__all__ = [
    "Event",
    "Headline",
    "HistoryPoint",
    "Level",
    "LoaderStatus",
    "PackStatus",
    "ReaderStatus",
    "ServerStatus",
    "SourceStatus",
    "Stall",
    "StreamPhase",
    "StreamStatus",
]


class StreamPhase(StrEnum):
    """Phase of a stream's attempt (``protocol.attempt.Phase``), or that there will be no other."""

    FORMING = "forming"
    RESTORING = "restoring"
    WELCOMING = "welcoming"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatus:
    """Status of one reader of a stream. Positions are (step, index) of its next micro-batch."""

    rank: int
    at: str  # its coordinates
    state: ReaderState
    cause: Cause | None = None  # of a reader that waits or is lost, or of one whose loop is not asking
    why: str = ""  # the same as a sentence
    taken: tuple[int, int] = (0, 0)  # handed out to its loop: everything before this
    sent: tuple[int, int] = (0, 0)
    ready: int = 0  # micro-batches sent that its loop has not taken
    lag: int = 0  # micro-batches behind the furthest reader
    loop_age_s: float = 0.0  # since its loop last asked; 0 while it asks
    silence_s: float = 0.0  # since it was last heard
    waits_s: float = 0.0  # for so long now
    waited_s: float = 0.0  # in all, to the second


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Reason why a stream does not go on: the first cause, not what follows from it."""

    cause: Cause
    why: str
    since_s: float = 0.0
    waiting: int  # readers


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """Status of one source, in what was packed since the stream began or was restored."""

    name: str
    samples: int  # drawn
    tokens: int  # ids drawn
    packed: int  # targets in micro-batches
    pending: int  # targets that wait to be packed
    skipped: int  # samples whose content is unusable
    lost_samples: int  # dropped for their length
    lost_tokens: int  # dropped or cut off for their length
    unsupervised_tokens: int  # dropped, as nothing around them is trained on
    share: float  # of the tokens of all sources so far
    weight: float  # what its share shall be
    epoch: int  # from 0
    epochs: int | None  # None: endless
    progress: float  # of this epoch: shards that were opened


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStatus:
    """Status of the loader processes of one stream."""

    workers: int  # processes; 0: the server loads itself
    busy: float  # share of them that were at work over the last half minute
    restarts: int  # processes that died and were replaced
    waits_for: str = ""  # the block that the next step waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStatus:
    """Row of the last step: slots of each segment, with and without its alignment padding."""

    width: int
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]  # the padding behind the last segment is in none
    rank: int  # data-parallel
    index: int
    filler: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """Point of a stream's history: one second."""

    age_s: float
    tokens_per_s: float  # delivered: of steps that every reader has taken
    fill: float  # useful, of the steps made in it; 0 where none was
    waiting: int  # readers
    held: int  # steps made, and not yet taken by all


class Level(StrEnum):
    """Level of a headline: whether something is wrong."""

    GOOD = "good"
    NOTICE = "notice"  # nothing is wrong, and nothing is trained yet
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Headline:
    """Summary of a stream (``with_headline``): "training", "step 1,204, 16.2 M tokens/s …"."""

    level: Level = Level.NOTICE
    word: str = ""
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """Status of one stream at one moment."""

    name: str
    phase: StreamPhase
    phase_s: float
    attempt: int
    step: int  # where the slowest reader stands
    stall: Stall | None
    failure: str | None
    contract: Mapping[str, str | int | float | bool | None]
    derived: Mapping[str, str | int | float | bool | None]  # what follows: micro-batches a step, alignment …
    readers: tuple[ReaderStatus, ...]
    sources: tuple[SourceStatus, ...]
    loaders: LoaderStatus
    packs: tuple[PackStatus, ...]  # some of the last step
    held: int  # steps made, and not yet taken by all
    steps_ahead: int
    steps: int  # made
    delivered_steps: int  # taken by every reader
    microbatches: int  # made
    tokens: int
    loss_tokens: int
    slots: int
    fill: float  # of the last step: slots of segments with their alignment padding, by row slots
    useful_fill: float  # of the last step: tokens by row slots
    snapshot_bytes: int
    replayed: int  # micro-batches sent again
    reconnects: int
    rejects: Mapping[str, int]  # by rule
    stalled_s: Mapping[str, float]  # by cause, to the second
    history: tuple[HistoryPoint, ...] = ()  # oldest first
    headline: Headline = Headline()  # filled in by ``with_headline``
    notable: tuple[int, ...] = ()  # ranks to look at, a few, the first first; filled in the same way


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Line of the log: a warning or an error."""

    age_s: float
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """Status of a server with all its streams."""

    version: str
    endpoint: str
    uptime_s: float
    age_s: float  # of this description, when it is given out: how long ago the data loop turned
    connections: int
    ready: bool  # the first step of the first stream is made
    streams: tuple[StreamStatus, ...]
    events: tuple[Event, ...] = ()  # the last first
