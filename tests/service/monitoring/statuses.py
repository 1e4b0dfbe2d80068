"""Statuses that no server made: of jobs that do well, that are stalled, and whatever the types allow."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from packhorse_service.monitoring.headline import with_headline
from packhorse_service.monitoring.status import (
    Event,
    HistoryPoint,
    LoaderStatus,
    PackStatus,
    ReaderStatus,
    ServerStatus,
    SourceStatus,
    Stall,
    StreamPhase,
    StreamStatus,
)
from packhorse_service.protocol.diagnosis import Cause, ReaderState

__all__ = ["a_reader", "a_stall", "a_status", "a_stream", "statuses", "with_stream"]

SEQ_LENGTH = 8192
STEP = 1204
AHEAD = {"taken": (STEP + 2, 0), "ready": 0, "lag": 0, "loop_age_s": 0.0}
BEHIND = {"taken": (STEP, 3), "ready": 29, "lag": 29, "loop_age_s": 14.1}


def a_status(readers: int = 4, /, **changes: Any) -> ServerStatus:
    """A server whose only stream trains, in words."""
    described: dict[str, Any] = {
        "version": "0.1.0",
        "endpoint": "tcp://127.0.0.1:5555",
        "uptime_s": 4321.0,
        "age_s": 0.2,
        "connections": readers,
        "ready": True,
        "streams": (a_stream(readers),),
        "events": (
            Event(age_s=12.0, level="warning", text="dp0·cp1·tp0·pp0: reconnected after 3.1 s"),
            Event(age_s=500.0, level="error", text="a loader process died, and was replaced"),
        ),
    }
    return with_headline(ServerStatus(**described | changes))


def with_stream(status: ServerStatus, **changes: Any) -> ServerStatus:
    """The same with another first stream."""
    first, *others = status.streams
    return with_headline(replace(status, streams=(replace(first, **changes), *others)))


def a_stream(readers: int = 4, /, **changes: Any) -> StreamStatus:
    """One that trains."""
    described: dict[str, Any] = {
        "name": "train",
        "phase": StreamPhase.RUNNING,
        "phase_s": 4300.0,
        "attempt": 1,
        "step": STEP,
        "stall": None,
        "failure": None,
        "contract": {"packing": "online", "seq_length": SEQ_LENGTH, "global_batch_size": 64, "static_shapes": False},
        "derived": {"num_microbatches": 16, "segment_multiple": 8, "fingerprint": "9f31c4e07b6a5d2e8c10f4b7a9d3e651"},
        "readers": tuple(a_reader(rank, readers) for rank in range(readers)),
        "sources": (_source("docs", 0.748, 0.75, 1, 3), _source("chat", 0.252, 0.25, 0, None, skipped=2)),
        "loaders": LoaderStatus(workers=2, busy=0.41, restarts=1),
        "packs": tuple(_pack(rank, index) for rank in range(4) for index in range(2)),
        "held": 2,
        "steps_ahead": 2,
        "steps": STEP + 2,
        "delivered_steps": STEP,
        "microbatches": (STEP + 2) * 16,
        "tokens": 632_000_000,
        "loss_tokens": 401_000_000,
        "slots": 640_000_000,
        "fill": 0.9968,
        "useful_fill": 0.9893,
        "snapshot_bytes": 1384,
        "replayed": 3,
        "reconnects": 1,
        "rejects": {"SEQ_LENGTH_MATCH": 4},
        "stalled_s": {"startup": 12.0, "loading": 3.0},
        "history": tuple(_moment(age, readers) for age in range(300, -1, -1)),
    }
    return StreamStatus(**described | changes)


def a_reader(rank: int, readers: int = 4, /, **changes: Any) -> ReaderStatus:
    """One that trains, or gets its next micro-batch."""
    busy = rank % 7 != 3
    described: dict[str, Any] = {
        "rank": rank,
        "at": f"dp{rank // 2}·cp{rank % 2}·tp0·pp0",
        "state": ReaderState.TRAINING if busy else ReaderState.RECEIVING,
        "taken": (STEP, rank * 5 % 16 // 8),
        "sent": (STEP + 1, 0),
        "ready": rank % 3,
        "lag": rank % 2,
        "loop_age_s": rank * 7 % 10 / 10 if busy else 0.0,
        "silence_s": 0.3,
        "waited_s": float(rank * 13 % (5 + readers)),
    }
    return ReaderStatus(**described | changes)


def a_stall(cause: Cause = Cause.SLOW_PEER, readers: int = 4) -> dict[str, Any]:
    """What of a stream says that rank 1 does not ask, and all others wait for it."""
    peer = a_reader(1, readers).at
    waiting = [
        a_reader(
            rank,
            readers,
            state=ReaderState.WAITING,
            cause=cause,
            why=f"waits for {peer} to take step {STEP:,}",
            waits_s=12.4,
            **AHEAD,
        )
        for rank in range(readers)
    ]
    why = "its training loop last asked 14 s ago; 29 micro-batches are ready for it"
    waiting[1] = a_reader(1, readers, cause=Cause.TRAINER, why=why, **BEHIND)
    stall = Stall(cause=cause, why=f"the stream waits for {peer}", since_s=12.4, waiting=readers - 1)
    return {"readers": tuple(waiting), "stall": stall, "stalled_s": {str(cause): 12.0}}


def _source(name: str, share: float, weight: float, epoch: int, epochs: int | None, skipped: int = 0) -> SourceStatus:
    return SourceStatus(
        name=name,
        samples=round(412_000 * share),
        tokens=round(632_000_000 * share),
        packed=round(631_000_000 * share),
        pending=round(400_000 * share),
        skipped=skipped,
        lost_samples=0,
        lost_tokens=88_008 if name == "docs" else 0,
        unsupervised_tokens=0,
        share=share,
        weight=weight,
        epoch=epoch,
        epochs=epochs,
        progress=0.43,
    )


def _pack(rank: int, index: int) -> PackStatus:
    """A row of segments of every size; what is left over at the end is empty."""
    lengths = [3 + (rank * 37 + index * 61 + k * k * 97) % 1400 for k in range(30)]
    padded = [-(-length // 8) * 8 for length in lengths]
    fitting = sum(end <= SEQ_LENGTH for end in accumulate(padded))
    return PackStatus(
        width=SEQ_LENGTH,
        lengths=tuple(lengths[:fitting]),
        padded_lengths=tuple(padded[:fitting]),
        rank=rank,
        index=index,
        filler=(rank, index) == (3, 1),
    )


def _moment(age: int, readers: int) -> HistoryPoint:
    gust = 1 + (age * 37 % 11 - 5) / 40
    return HistoryPoint(
        age_s=float(age),
        tokens_per_s=16_200_000 * gust if age < 280 else 0.0,
        fill=0.989 + age % 7 / 1000 if age % 3 else 0.0,
        waiting=age * age % (readers + 1) // 2,
        held=1 + age % 3,
    )


# Whatever the types allow ----------------------------------------------------------------------------------

SCALARS: Mapping[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**64 - 1),  # what JSON carries
    float: st.floats(),
    bool: st.booleans(),
    type(None): st.none(),
}
FINITE = {**SCALARS, float: st.floats(allow_nan=False, allow_infinity=False)}


def statuses(*, finite: bool = False) -> st.SearchStrategy[ServerStatus]:
    """Any at all, with a few of everything, without words as the server's loop makes it. ``finite``: JSON keeps it."""
    scalars = FINITE if finite else SCALARS
    return typing.cast(st.SearchStrategy[ServerStatus], _of_type(ServerStatus, scalars))


def _of_type(kind: Any, scalars: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if kind in scalars:
        return scalars[kind]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        made = {field.name: _of_type(hints[field.name], scalars) for field in fields(kind)}
        return st.builds(kind, **made)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    return _of_generic(get_origin(kind), [_Part(each, scalars) for each in get_args(kind)])


class _Part(typing.NamedTuple):
    """One argument of a generic type."""

    kind: Any
    scalars: Mapping[Any, st.SearchStrategy[Any]]

    def values(self) -> st.SearchStrategy[Any]:
        return _of_type(self.kind, self.scalars)


def _of_generic(origin: Any, parts: Sequence[_Part]) -> st.SearchStrategy[Any]:
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(part.values() for part in parts))
    if origin is tuple and parts[-1].kind is Ellipsis:
        return st.lists(parts[0].values(), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(part.values() for part in parts))
    assert origin is Mapping, origin
    return st.dictionaries(*(part.values() for part in parts), max_size=3)
