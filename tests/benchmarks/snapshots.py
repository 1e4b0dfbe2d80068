"""What a snapshot takes: bytes, microseconds to make, and how long a stream needs to stand where it was taken.

    python -m tests.benchmarks.snapshots

Sizes are exact and the same on every machine; times are the best or the median of several runs, of this machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

from packhorse.wire.limits import SNAPSHOT_LIMIT_BYTES
from packhorse_service.loading.block import BlockRequest, TokenBlock
from packhorse_service.loading.decode import BlockLoader
from packhorse_service.loading.engine import InlineEngine
from packhorse_service.mixing.order import OrderCursor
from packhorse_service.mixing.replay_log import PIECES_LIMIT
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.planning.window_position import WindowPosition
from packhorse_service.snapshot.codec import (
    PackShape,
    StreamSnapshot,
    decode_snapshot,
    encode_snapshot,
)
from packhorse_service.snapshot.fingerprint import StreamFingerprint
from tests.benchmarks.measuring import console
from tests.service.corpus import MemoryCorpus, make_plan, write_shard

CAPACITY = 8192
FINGERPRINT = StreamFingerprint.of({str(part): part for part in range(8)}, {})
WINDOW = WindowPosition(0, 0, 1, 64, bytes(8))
PACKS = 400
BLOCK = 200  # samples


# Size and cost -----------------------------------------------------------------------------------------


def stream_of(open_shards: int, mean: float) -> SampleStream:
    """Four endless sources of log-normal lengths, in blocks of 200 samples, ``open_shards`` open in all."""
    corpus, random = MemoryCorpus(), np.random.default_rng(0)
    for number, weight in enumerate((5, 3, 2, 1)):
        lengths = random.lognormal(np.log(mean) - 0.72, 1.2, BLOCK)
        ids = np.clip(lengths.astype(int), 2, CAPACITY + 1)
        offsets = np.concatenate([[0], np.cumsum(ids)]).astype(np.int64)
        block = TokenBlock(np.zeros(offsets[-1], np.uint32), offsets, None, None, tuple(map(str, range(BLOCK))), None)
        shards = [[block]] * max(open_shards // 4 + 1, 4)
        corpus.add(shards, name=f"source {number}", weight=weight, epochs=None, open_shards=open_shards // 4)
    return corpus.stream(CAPACITY)


def snapshots_of(stream: SampleStream, lookahead: int) -> Iterator[tuple[bytes, int, float]]:
    """After each pack: a snapshot, the pieces drawn since its order, and the seconds it took."""
    packer = FifoExactTailPacker(PackingPlan(capacity=CAPACITY, lookahead=lookahead * CAPACITY))
    shape = PackShape(CAPACITY, 1)
    for step in range(PACKS):
        while packer.wants_more and not stream.at_snapshot_limit:
            for piece in stream.draw() or []:
                packer.add(piece.number, piece.slots)
        stream.mark_packed(packer.next_pack())
        start = time.perf_counter()
        made = StreamSnapshot(step, stream.cursor(), ConsumedUnit.LOOKAHEAD, 0, shape, WINDOW)
        data = encode_snapshot(made, FINGERPRINT)
        yield data, len(made.cursor.packed), time.perf_counter() - start


def cost_table() -> Table:
    """Bytes and microseconds, in steady state."""
    title = f"A snapshot: log-normal lengths, L = {CAPACITY:,}, after each of {PACKS // 2} packs"
    table = Table("mean ids", "packs", "shards", "drawn", "bytes", "allowed", "µs", "µs, 99 %", title=title)
    table.caption = "drawn: pieces since its order, most; allowed: a bit of each, 32 bytes a shard and 1 KiB"
    for mean, lookahead, shards in (
        (500, 16, 16),
        (500, 64, 16),
        (500, 256, 16),
        (60, 64, 16),
        (500, 64, 256),
        (500, 64, 1024),
    ):
        taken = list(snapshots_of(stream_of(shards, mean), lookahead))[PACKS // 2 :]
        times = sorted(seconds * 1e6 for _, _, seconds in taken)
        most = max(drawn for _, drawn, _ in taken)
        table.add_row(
            str(mean),
            str(lookahead),
            str(shards),
            f"{most:,}",
            f"{max(len(data) for data, _, _ in taken):,}",
            f"{most // 8 + 1 + 32 * shards + 1024:,}",
            f"{median(times):.1f}",
            f"{times[len(times) * 99 // 100]:.1f}",
        )
    return table


def worst_table() -> Table:
    """The largest there is: all that may be drawn ahead."""
    stream = stream_of(16, 3)
    while not stream.at_snapshot_limit:
        stream.draw()
    shape, times = PackShape(CAPACITY, 1), []
    for _ in range(50):
        start = time.perf_counter()
        data = encode_snapshot(
            StreamSnapshot(1, stream.cursor(), ConsumedUnit.LOOKAHEAD, 0, shape, WINDOW), FINGERPRINT
        )
        times.append((time.perf_counter() - start) * 1e6)
    table = Table("drawn ahead", "bytes", "limit", "µs, median", title="The largest lookahead that is ever drawn")
    table.add_row(f"{PIECES_LIMIT:,}", f"{len(data):,}", f"{SNAPSHOT_LIMIT_BYTES:,}", f"{median(times):.1f}")
    return table


# Resuming ----------------------------------------------------------------------------------------------


class CountingEngine(InlineEngine):
    def __init__(self, plan: StreamPlan) -> None:
        super().__init__(BlockLoader(plan.decoding).load)
        self.asked = 0

    def submit(self, request: BlockRequest) -> Future[TokenBlock]:
        self.asked += 1
        return super().submit(request)


def corpus_plan(base: Path) -> StreamPlan:
    """Two endless sources on disk, in blocks of 64 KiB; a step is one pack of 2,048 slots."""
    random = np.random.default_rng(0)
    for name in ("docs", "chat"):
        for shard in range(8):
            lengths = np.clip(random.lognormal(5.0, 1.0, 1500).astype(int), 2, 2049).tolist()
            samples = {f"{i:05d}": random.integers(0, 60_000, length).tolist() for i, length in enumerate(lengths)}
            write_shard(base / name / f"part-{shard:03d}.tar", samples)
    sources: dict[str, dict[str, object]] = {
        name: {"shards": f"{name}/part-*.tar", "epochs": "endless", "weight": 2 - number}
        for number, name in enumerate(("docs", "chat"))
    }
    contract = {"seq_length": 2048, "global_batch_size": 1}
    loading = {"workers": 0, "block_bytes": 64 << 10}
    return make_plan(base, sources, contract=contract, packing={"lookahead": 32}, loading=loading)


def resume_table(base: Path) -> Table:
    """Step 10,000 against step 10."""
    plan = corpus_plan(base)
    pipeline = Pipeline(plan, InlineEngine(BlockLoader(plan.decoding).load))
    at: dict[int, list[bytes]] = {10: [], 1_000: [], 10_000: []}
    start = time.perf_counter()
    for step in range(10_010):
        planned = pipeline.next_planned_step()
        assert planned is not None
        for first, snapshots in at.items():
            if first <= step < first + 10:
                snapshots.append(planned.snapshot)
    whole = time.perf_counter() - start
    title = "Resumed until the next step is planned: ten snapshots in a row, two sources on disk, blocks of 64 KiB"
    table = Table("at step", "ms, median", "over step 10", "blocks read", "drawn again", title=title)
    first_of_all = 0.0
    for step, snapshots in at.items():
        times, asked, drawn = [], [], []
        for snapshot in snapshots * 5:
            engine = CountingEngine(plan)
            resumed = Pipeline(plan, engine)
            engine.asked = 0
            begin = time.perf_counter()
            resumed.restore(snapshot)
            resumed.next_planned_step()
            times.append(1e3 * (time.perf_counter() - begin))
            asked.append(engine.asked)
            drawn.append(_drawn_again(resumed, snapshot))
        first_of_all = first_of_all or median(times)
        table.add_row(
            f"{step:,}",
            f"{median(times):.1f}",
            f"{median(times) / first_of_all:.2f}",
            f"{np.mean(asked):.1f}",
            f"{np.mean(drawn):.0f}",
        )
    table.caption = f"running from the start to step 10,010 takes {whole:.1f} s"
    return table


def _drawn_again(pipeline: Pipeline, snapshot: bytes) -> int:
    plan = pipeline.plan
    first = OrderCursor.at_start((source.order for source in plan.sources), plan.mixing)
    return sum(cut.draws for cut in decode_snapshot(snapshot, plan.fingerprint, first).cursor.cut_lengths)


def tables(*, quick: bool = False) -> Iterator[Table]:
    """Size, cost and resuming, which takes half a minute."""
    yield cost_table()
    yield worst_table()
    if not quick:
        with tempfile.TemporaryDirectory() as folder:
            yield resume_table(Path(folder))


def main() -> None:
    out = console()
    for table in tables():
        out.print(table)


if __name__ == "__main__":
    main()
