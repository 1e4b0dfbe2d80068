"""How full, how fast, how late, how even: our packer beside plain next-fit, FFD and BFD per chunk of 1,000.

    python -m tests.benchmarks.packing

Fill, waits and balance are exact and the same on every machine; speeds are ratios, or the best of several
runs, of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from packhorse.contract.batch_contract import BatchContract, ResolvedContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.rows.row import Row, SampleKey
from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.piece import Piece
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.modes import PackedMicroBatch
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import CostModel, assign_to_ranks, assign_to_steps
from packhorse_service.planning.rows import build_rows
from tests.benchmarks import plain_packers
from tests.benchmarks.measuring import best_cpu_seconds, console
from tests.benchmarks.plain_packers import per_chunk
from tests.length_streams import (
    LONG,
    STREAMS,
    Lengths,
    bimodal,
    fill_of,
    in_arrival_order,
    length_files,
    log_normal,
    mixture,
    packs_of,
    shares_of,
    tiled,
)

SAMPLES = 60_000
CAPACITIES = (4096, 8192, 32_768)

PLAIN: dict[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "next-fit": plain_packers.next_fit,
    "FFD per 1,000": lambda sizes, capacity: per_chunk(plain_packers.first_fit_decreasing, sizes, capacity),
    "BFD per 1,000": lambda sizes, capacity: per_chunk(plain_packers.best_fit_decreasing, sizes, capacity),
}


def ours(sizes: Sequence[int], capacity: int, lookahead: float, *, drain: bool = False) -> list[list[int]]:
    """Packs of the product, as samples; ``lookahead`` in packs' worth."""
    plan = PackingPlan(capacity=capacity, lookahead=int(lookahead * capacity))
    return list(packs_of(sizes, FifoExactTailPacker(plan), drain=drain))


def fill_of_sizes(packs: Sequence[Sequence[int]], capacity: int) -> float:
    return sum(map(sum, packs)) / (len(packs) * capacity)


# Fill ---------------------------------------------------------------------------------------------------


def streams_table() -> Table:
    """Slot fill in steady state, in percent."""
    columns = [f"{stream} {capacity}" for stream in STREAMS for capacity in CAPACITIES]
    table = Table("slot fill, %", *columns, title=f"Seeded streams, {SAMPLES:,} samples, no flush at the end")
    lengths = {
        (stream, capacity): STREAMS[stream](SAMPLES, capacity, 0) for stream in STREAMS for capacity in CAPACITIES
    }
    for lookahead in (16, 64, 256):
        fills = (
            fill_of(ours(sizes.tolist(), capacity, lookahead), sizes.tolist(), capacity)
            for (_, capacity), sizes in lengths.items()
        )
        table.add_row(f"ours, W = {lookahead}", *(f"{100 * fill:.3f}" for fill in fills))
    for name, pack in PLAIN.items():
        fills = (fill_of_sizes(pack(sizes.tolist(), capacity), capacity) for (_, capacity), sizes in lengths.items())
        table.add_row(name, *(f"{100 * fill:.3f}" for fill in fills))
    return table


def files_table() -> Table:
    """Packs over the lower bound, in percent, the flush at the end included."""
    names = ["ours", *PLAIN]
    columns = [f"{name} {capacity}" for capacity in CAPACITIES for name in names]
    title = "Real lengths, tiled to 50,000 samples; ours looks as many ahead as a chunk has"
    table = Table("packs over the bound, %", *columns, title=title)
    for file in length_files():
        cells = []
        for capacity in CAPACITIES:
            lengths = tiled(file, capacity)
            sizes: list[int] = lengths.tolist()
            bound = -(-sum(sizes) // capacity)
            counts = [len(ours(sizes, capacity, max(1, 1000 * lengths.mean() / capacity), drain=True))]
            counts += [len(pack(sizes, capacity)) for pack in PLAIN.values()]
            cells += [f"{100 * (count / bound - 1):.2f}" for count in counts]
        table.add_row(file, *cells)
    return table


def alignment_table() -> Table:
    """Useful fill against the bound that alignment sets."""
    table = Table("useful fill, %", "m", "bound", "ours, W = 64", title="Segments aligned to m slots, L = 8,192")
    for stream in ("log-normal", "bimodal"):
        for multiple in (8, 16, 32, 64):
            lengths = STREAMS[stream](SAMPLES, 8192, 0)
            units = -(-lengths // multiple)
            packs = ours(units.tolist(), 8192 // multiple, 64)
            packed = np.fromiter(chain.from_iterable(packs), int)
            bound = lengths[packed].sum() / (units[packed].sum() * multiple)
            useful = lengths[packed].sum() / (len(packs) * 8192)
            table.add_row(stream, str(multiple), f"{100 * bound:.3f}", f"{100 * useful:.3f}")
    return table


# Order and balance -------------------------------------------------------------------------------------


def mixture_table() -> Table:
    """Standard deviation of the share of long samples in steps of 64 packs."""
    table = Table("stream", "arrival order", "ours, W = 64", "ratio", title="Share of long samples by step, L = 32,768")
    mixed, long = mixture(300_000, 32_768)
    two = bimodal(300_000, 32_768)
    for name, lengths, marked in (("50/30/20 mixture", mixed, long), ("bimodal", two, two >= LONG)):
        sizes: list[int] = lengths.tolist()
        both = (in_arrival_order(sizes, 32_768), ours(sizes, 32_768, 64))
        theirs, here = (float(np.std(shares_of(packs, lengths, marked, 64))) for packs in both)
        table.add_row(name, f"{100 * theirs:.2f} points", f"{100 * here:.2f} points", f"{here / theirs:.3f}")
    return table


def pooled_files(capacity: int) -> Lengths:
    """All real lengths that fit, shuffled together."""
    pool = np.concatenate([np.unique(tiled(file, capacity, 1)) for file in length_files()])
    return np.random.default_rng(0).choice(pool, SAMPLES)


def balance_table() -> Table:
    """Synchronous imbalance: sum over micro-batches of the costliest rank, over the mean."""
    table = Table("stream", "as they arrive", "G = 1", "G = 2", "G = 4", title="DP 64 x 4 micro-batches, L = 32,768")
    streams = {name: make(8 * SAMPLES, 32_768, 0) for name, make in STREAMS.items()}
    if length_files():
        streams["real lengths, pooled"] = pooled_files(32_768)
    for name, lengths in streams.items():
        costs = _costs(lengths)
        cells = [np.mean([_imbalance(np.array(step).reshape(4, 64).T) for step in _windows(costs, 256)])]
        cells += [np.mean(list(_planned(costs, steps))) for steps in (1, 2, 4)]
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
    return table


def _costs(lengths: Lengths) -> list[int]:
    """Of the first twelve steps' packs."""
    sizes: list[int] = lengths.tolist()
    model = CostModel()
    packs = ours(sizes, 32_768, 64)[: 12 * 256]
    return [model.cost([sizes[sample] for sample in pack]) for pack in packs]


def _windows(costs: list[int], packs: int) -> Iterator[list[int]]:
    return (costs[start : start + packs] for start in range(0, len(costs) - packs + 1, packs))


def _planned(costs: list[int], steps: int) -> Iterator[float]:
    for seed, window in enumerate(_windows(costs, 256 * steps)):
        for packs in assign_to_steps(window, steps, seed):
            step = [window[pack] for pack in packs]
            yield _imbalance(np.array(step)[np.array(assign_to_ranks(step, 64, [1] * len(step)))])


def _imbalance(costs: npt.NDArray[np.int64]) -> float:
    """Of one step's costs [rank, index]."""
    return float(costs.max(axis=0).sum() / costs.sum(axis=1).mean())


# Speed --------------------------------------------------------------------------------------------------


def speed_table() -> Table:
    """Sequences a second on one core."""
    table = Table("", "M sequences/s", "ours over it", title="Log-normal, L = 8,192; W = 64 for ours; lengths only")
    sizes: list[int] = log_normal(SAMPLES, 8192).tolist()
    own = best_cpu_seconds(lambda: ours(sizes, 8192, 64))
    table.add_row("ours", f"{len(sizes) / own / 1e6:.2f}", "1.00")
    for name, pack in PLAIN.items():
        taken = best_cpu_seconds(partial(pack, sizes, 8192))
        table.add_row(name, f"{len(sizes) / taken / 1e6:.2f}", f"{taken / own:.2f}")
    return table


def rows_table() -> Table:
    """Building what a trainer gets of each row, against copying as many bytes."""
    title = "Rows from blocks: int64 tokens, labels, positions, float32 mask, both offsets; steps of 64 packs"
    table = Table("L", "loss mask", "GB/s", "memcpy GB/s", "share", title=title)
    for capacity in CAPACITIES:
        contract = resolve(
            BatchContract(), ParallelLayout(), seq_length=capacity, global_batch_size=64, vocab_size=60_000
        )
        for masked in (False, True):
            steps = _steps_of_pieces(capacity, masked)
            row_bytes = sum(array.nbytes for array in delivered(build_rows(steps[0], contract, NO_KEYS)[0]))
            building = best_cpu_seconds(partial(_build, steps, contract))
            source, target = (np.ones(64 * row_bytes, np.uint8) for _ in range(2))
            copying = best_cpu_seconds(partial(_copy, len(steps), source, target))
            written = len(steps) * 64 * row_bytes
            table.add_row(
                f"{capacity:,}",
                "of chats" if masked else "all ones",
                f"{written / building / 1e9:.1f}",
                f"{written / copying / 1e9:.1f}",
                f"{copying / building:.0%}",
            )
    return table


NO_KEYS: list[tuple[SampleKey, ...]] = [()] * 64


def _build(steps: Sequence[Sequence[PackedMicroBatch]], contract: ResolvedContract) -> None:
    """One step after the other; each is dropped for the next, as a server does."""
    for step in steps:
        rows = [delivered(row) for row in build_rows(step, contract, NO_KEYS)]
        del rows


def _copy(steps: int, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    for _ in range(steps):
        np.copyto(target, source)


def delivered(row: Row) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of a micro-batch: tokens, labels, loss mask, positions, both offsets."""
    tokens = row.tokens.astype(np.int64)
    labels = np.empty_like(tokens)
    labels[:-1] = row.tokens[1:]
    labels[row.geometry.last_slots] = row.last_targets
    for stretch in row.geometry.padding:
        labels[stretch] = -100
    mask = row.loss_mask.astype(np.float32)
    return tokens, labels, mask, row.geometry.position_ids, row.cu_seqlens, row.cu_seqlens_padded


def _steps_of_pieces(capacity: int, masked: bool) -> list[list[PackedMicroBatch]]:
    """Steps of 64 packs of random ids, in blocks of 512 samples."""
    random = np.random.default_rng(0)
    lengths = log_normal(SAMPLES, capacity)
    pieces: list[Piece] = []
    for start in range(0, len(lengths), 512):
        offsets = np.concatenate([[0], np.cumsum(lengths[start : start + 512] + 1)])
        ids = random.integers(0, 60_000, offsets[-1]).astype(np.uint32)
        mask = (ids % 2).astype(np.uint8) if masked else None
        block = TokenBlock(ids, offsets, mask, None, (), None)
        for sample, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
            pieces.append(Piece(len(pieces), 0, 0, block, sample, begin, end, end - begin - 1))
    packs = [
        PackedMicroBatch.of([[pieces[sample]] for sample in pack]) for pack in ours(lengths.tolist(), capacity, 64)
    ]
    return [packs[start : start + 64] for start in range(0, min(len(packs) - 63, 1024), 64)]


QUICK = (streams_table, speed_table, rows_table)
ALL = (streams_table, files_table, alignment_table, mixture_table, balance_table, speed_table, rows_table)


def tables(*, quick: bool = False) -> Iterator[Table]:
    """Fill, order, balance and speed; ``quick``: the first and the last only."""
    return (table() for table in (QUICK if quick else ALL))


def main() -> None:
    out = console()
    for table in tables():
        out.print(table)


if __name__ == "__main__":
    main()
