"""GB/s, messages/s and CPU of our transport beside a raw socket and plain ZeroMQ, in one run.

    python -m tests.benchmarks.transport [--transport tcp] [--ranks 1 4] [--size 16 64 …] [--repeats 5]

One sender thread and a process for each receiver; the kinds of one cell follow each other in every repeat,
and medians are shown. The bytes are those of a BATCH whose payload is near the size in the first column.
``ours`` is the protocol's two halves over the product's sockets, ``rebuilt`` with int64 and float32 arrays
made of each payload, ``Feed`` with the client's thread and loop as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import zmq
from rich.table import Table

from tests.benchmarks.measuring import console
from tests.benchmarks.transport_ends import ENDS, WAIT_S, Case, Measured

KIB = 1 << 10
SIZES_KIB = (16, 64, 256, 1024, 4096)
RANKS = (1, 4, 8)
REPEATS = 5
# Of what it was asked to free once, and of all that is smaller, glibc keeps the pages from then on (mallopt(3),
# M_MMAP_THRESHOLD). A trainer has long freed something large; who has not gets new pages for each large message.
LARGE_BYTES = 31 << 20
# Bytes sent to all receivers together: enough for about a third of a second.
BYTES = {16: 192 << 20, 64: 512 << 20, 256: 1 << 30, 1024: 1 << 30, 4096: 1 << 30}


@dataclass(frozen=True)
class Result:
    """One run of one kind."""

    gb_s: float
    messages_s: float
    cpu_s_gb: float  # both ends


@dataclass(frozen=True)
class Crew:
    """Processes that stay: a sender, and as many receivers as the widest case needs."""

    sender: Connection
    receivers: Sequence[Connection]

    def run(self, case: Case) -> Result:
        """Send and receive once."""
        self.sender.send((case, None, None))
        endpoint = _heard(self.sender)
        receivers = self.receivers[: case.ranks]
        for rank, receiver in enumerate(receivers):
            receiver.send((case, endpoint, rank))
        ends: list[Measured] = [_heard(receiver) for receiver in receivers]
        sent: Measured = _heard(self.sender)
        messages = (case.messages - case.messages // 10) * case.ranks
        gigabytes = messages * (len(case.header) + len(case.view.payload)) / 1e9
        wall_s = max(end.end_s for end in ends) - min(end.begin_s for end in ends)
        cpu_s = sent.cpu_s + sum(end.cpu_s for end in ends)
        return Result(gigabytes / wall_s, messages / wall_s, cpu_s / gigabytes)


def _heard(end: Connection) -> Any:
    assert end.poll(WAIT_S), "a process of the benchmark does not answer"
    return end.recv()


def _work(end: Connection) -> None:
    """A process of the crew: cases come in, what it measured goes out."""
    np.empty(LARGE_BYTES, np.uint8)  # and free it
    while (told := end.recv()) is not None:
        case, endpoint, rank = told
        ends = ENDS[case.kind]
        end.send(ends.send(case, end.send) if endpoint is None else ends.receive(case, endpoint, rank))


@contextmanager
def crew(ranks: int) -> Iterator[Crew]:
    context = multiprocessing.get_context("spawn")
    ours, processes = [], []
    for _ in range(ranks + 1):
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there,), daemon=True)
        process.start()
        ours.append(here)
        processes.append(process)
    try:
        yield Crew(ours[0], ours[1:])
        for end in ours:
            end.send(None)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def measure(
    crew: Crew, kinds: Sequence[str], transport: str, size_kib: int, ranks: int, repeats: int
) -> dict[str, Result]:
    """The medians of each kind; the kinds follow each other in each repeat."""
    found: dict[str, list[Result]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for kind in kinds:
                found[kind].append(crew.run(_case(kind, transport, size_kib, ranks, folder)))
    return {kind: _median(results) for kind, results in found.items()}


def _case(kind: str, transport: str, size_kib: int, ranks: int, folder: str) -> Case:
    keys = zmq.curve_keypair() if transport == CURVE and kind != "raw socket" else None
    case = Case(kind, "ipc" if transport == "ipc" else "tcp", size_kib * KIB, ranks, 0, folder, keys)
    steps = max(4, BYTES[size_kib] // (case.size * ranks * case.messages_a_step))
    if keys:
        steps = max(4, steps // 4)
    return replace(case, messages=steps * case.messages_a_step)


def _median(results: Sequence[Result]) -> Result:
    return Result(*(median(getattr(result, name) for result in results) for name in ("gb_s", "messages_s", "cpu_s_gb")))


CURVE = "tcp with CURVE"
PLAIN_KINDS = tuple(ENDS)
# What a transport is measured with.
KINDS: dict[str, tuple[str, ...]] = {
    "tcp": PLAIN_KINDS,
    "ipc": PLAIN_KINDS,
    CURVE: ("raw socket", "plain ZeroMQ", "ours", "ours, rebuilt"),  # Feed takes keys from files alone
}


def targets(size_kib: int) -> float:
    """The share of the raw socket to reach, over tcp without CURVE, by one and by four ranks."""
    return next(share for least, share in ((1024, 0.55), (256, 0.45), (0, 0.25)) if size_kib >= least)


def tables_of(
    crew: Crew, transport: str, sizes: Sequence[int], ranks: Sequence[int], repeats: int
) -> tuple[Table, Table]:
    """Speed, as GB/s and as a share of the raw socket; and CPU-seconds per GB of both ends."""
    kinds = KINDS[transport]
    cells = ("KiB", "ranks", "window")
    speed = Table(*cells, *kinds, "target", "messages/s", title=f"{transport}: GB/s, and share of the raw socket")
    cost = Table(*cells, *kinds, title=f"{transport}: CPU-seconds per GB, both ends")
    for size, count in product(sizes, ranks):
        results = measure(crew, kinds, transport, size, count, repeats)
        raw = results["raw socket"].gb_s
        ours = results["ours"]
        cell = (f"{size:,}", str(count), str(Case("", transport, size * KIB, count, 0, "").window))
        target = f"ours {targets(size):.0%}" if transport == "tcp" and count in (1, 4) else ""
        shares = [f"{result.gb_s:.2f} ({result.gb_s / raw:.0%})" for result in results.values()]
        speed.add_row(*cell, *shares, target, f"{ours.messages_s:,.0f}")
        cost.add_row(*cell, *(f"{result.cpu_s_gb:.2f}" for result in results.values()))
    return speed, cost


def tables(*, quick: bool = False) -> Iterator[Table]:
    """All of them; ``quick`` has one size of each kind of target, and no repeats."""
    sizes = (16, 256, 1024) if quick else SIZES_KIB
    ranks = (1, 4) if quick else RANKS
    with crew(max(ranks)) as workers:
        for transport in KINDS:
            yield from tables_of(workers, transport, sizes, ranks, 1 if quick else REPEATS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--size", nargs="+", type=int, choices=SIZES_KIB, default=SIZES_KIB, help="KiB")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    asked = parser.parse_args()
    screen = console()
    with crew(max(asked.ranks)) as workers:
        for transport in asked.transport:
            for table in tables_of(workers, transport, asked.size, asked.ranks, asked.repeats):
                screen.print(table)


if __name__ == "__main__":
    main()
