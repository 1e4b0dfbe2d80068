"""What a worker tells of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from packhorse.protocol.client_session import State
from packhorse_service.loadtest.ranks.simulated_rank import SimulatedRank
from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram
from packhorse_service.loadtest.ranks.worker_messages import Job, RankResult, WorkerProgress, WorkerResult

__all__ = ["progress_of", "result_of"]


def progress_of(
    ranks: Sequence[SimulatedRank], counted: Collection[int], waits: Mapping[int, int], now: float
) -> WorkerProgress:
    """Return how far ``ranks`` are at ``now``; ``waits`` are those since the last time."""
    every = [rank.counters for rank in ranks]
    return WorkerProgress(
        at_s=now,
        connected=sum(rank.queue.connected for rank in ranks),
        welcomed=sum(rank.session.state in (State.STREAMING, State.ENDED) for rank in ranks),
        started=sum(rank.first_taken_s is not None for rank in ranks),
        ended=sum(rank.ended for rank in ranks),
        failed=sum(rank.error is not None for rank in ranks),
        waiting=sum(rank.loop.asking_since is not None for rank in ranks),
        micro_batches=sum(each.micro_batches for each in every),
        tokens=sum(rank.counters.tokens for rank in ranks if number_of(rank) in counted),
        wire_bytes=sum(each.wire_bytes for each in every),
        waits=waits,
        waiting_for=waiting_for(ranks),
    )


def result_of(job: Job, ranks: Sequence[SimulatedRank], late: WaitHistogram, disconnects: int) -> WorkerResult:
    """Return everything that a worker measured of its ranks."""
    every = [rank.counters for rank in ranks]
    errors = [rank.error for rank in ranks if rank.error is not None]
    welcomed = [rank.welcomed_s for rank in ranks]
    firsts = [rank.first_taken_s for rank in ranks]
    agreed = [rank.session.progress.agreed for rank in ranks]
    stopped = WaitHistogram.merged(each.stopped_waits.bins for each in every)
    return WorkerResult(
        ranks=tuple(map(rank_result, ranks)),
        stopped_waits=stopped.bins,
        max_stopped_wait_s=max((each.stopped_waits.max_s for each in every), default=0.0),
        micro_batches=sum(each.micro_batches for each in every),
        fillers=sum(each.fillers for each in every),
        tokens=sum(rank.counters.tokens for rank in ranks if number_of(rank) in job.counted),
        delivered_tokens=round(sum(each.delivered for each in every)),
        wire_bytes=sum(each.wire_bytes for each in every),
        verified=sum(each.verified for each in every),
        num_microbatches=max((terms.num_microbatches for terms in agreed if terms is not None), default=0),
        last_taken_s=max((each.last_taken_s for each in every), default=0.0),
        welcomed_s=max((at for at in welcomed if at is not None), default=None) if None not in welcomed else None,
        first_taken_s=min((at for at in firsts if at is not None), default=None),
        all_taken_s=max((at for at in firsts if at is not None), default=None) if None not in firsts else None,
        late=late.bins,
        ended=sum(rank.ended for rank in ranks),
        disconnects=disconnects,
        errors=Counter(type(error).__name__ for error in errors),
        examples={type(error).__name__: str(error) for error in reversed(errors)},
        waiting_for=waiting_for(ranks),
    )


def waiting_for(ranks: Sequence[SimulatedRank]) -> Counter[str]:
    """Return milliseconds by what or whom the server said it waited for, of all these ranks together."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank.counters.waiting_for)
    return total


def rank_result(rank: SimulatedRank) -> RankResult:
    waits = rank.counters.waits
    return RankResult(
        rank=number_of(rank),
        micro_batches=rank.counters.micro_batches,
        waits=waits.bins,
        wait_s=waits.total_s,
        max_wait_s=waits.max_s,
    )


def number_of(rank: SimulatedRank) -> int:
    """Return the number of a rank in its job."""
    identity = rank.session.progress.identity
    return identity.layout.rank(identity.reader)
