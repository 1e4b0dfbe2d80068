"""Streams of sample lengths, as the packing study defines them: seeded, or tiled from real files.

Lengths over a pack's capacity are dropped: cutting them would make samples of exactly one pack, which
flatter every packer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from packhorse_service.packing.packer import LookaheadPacker
from tests.shared_data import SHARED

Lengths = npt.NDArray[np.int64]

FILES = SHARED / "data" / "lengths"
LONGEST = 32_768
LONG = 8192  # what the mixtures below call a long sample
SIGMA = 1.2


def _log_normal(random: np.random.Generator, count: int, mean: float) -> Lengths:
    drawn = random.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn.astype(np.int64), 1, LONGEST)


def log_normal(count: int, capacity: int, seed: int = 0) -> Lengths:
    """Chats: mean about 500 (median 242, p99 3.9k)."""
    drawn = _log_normal(np.random.default_rng(seed), 2 * count, 498)
    return drawn[drawn <= capacity][:count]


def bimodal(count: int, capacity: int, seed: int = 0) -> Lengths:
    """90 % log-normal of mean 1,000 and 10 % uniform 8k … 32k."""
    random = np.random.default_rng(seed)
    drawn = _log_normal(random, 2 * count, 1000)
    long = random.random(2 * count) < 0.1
    drawn[long] = random.integers(LONG, LONGEST + 1, np.count_nonzero(long))
    return drawn[drawn <= capacity][:count]


def uniform(count: int, capacity: int, seed: int = 0) -> Lengths:
    """1 … capacity: hard to pack, as half of the samples need a pack of their own."""
    return np.random.default_rng(seed).integers(1, capacity + 1, count)


STREAMS: Mapping[str, Callable[[int, int, int], Lengths]] = {
    "log-normal": log_normal,
    "bimodal": bimodal,
    "uniform": uniform,
}


def mixture(count: int, capacity: int, seed: int = 0) -> tuple[Lengths, npt.NDArray[np.bool_]]:
    """Chats, files and long documents, drawn at random with 50, 30 and 20 % of the tokens; and which are long."""
    random = np.random.default_rng(seed)
    files = np.clip(np.exp(random.normal(np.log(983), 1.6, count)).astype(np.int64), 1, capacity)
    long = random.integers(LONG, capacity + 1, count)
    kinds = [log_normal(count, capacity, seed), files, long]
    share = np.array([0.5, 0.3, 0.2]) / [kind.mean() for kind in kinds]
    source = random.choice(3, count, p=share / share.sum())
    return np.choose(source, kinds), source == 2


def length_files() -> list[str]:
    """Names of the real length files; none where they are not there."""
    return sorted(path.stem for path in FILES.glob("*.npy"))


def tiled(name: str, capacity: int, least: int = 50_000) -> Lengths:
    """The lengths of a real file that fit, repeated to at least so many."""
    lengths = np.load(FILES / f"{name}.npy").astype(np.int64)
    fitting = lengths[(lengths > 0) & (lengths <= capacity)]
    return np.tile(fitting, -(-least // len(fitting)))


# Packing them ----------------------------------------------------------------------------------------


def packs_of(
    sizes: Iterable[int], packer: LookaheadPacker, *, first: int = 0, drain: bool = True
) -> Iterator[list[int]]:
    """Pack samples of these sizes, numbered from ``first`` in arrival order.

    To the end, or (not ``drain``) while samples still arrive: the steady state.
    """
    arrivals = enumerate(sizes, first)
    while True:
        while packer.wants_more:
            arrival = next(arrivals, None)
            if arrival is None:
                break
            packer.add(*arrival)
        if not len(packer) or (packer.wants_more and not drain):
            return
        yield packer.next_pack()


def fill_of(packs: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> float:
    """Share of slots that are filled."""
    return sum(sizes[sample] for pack in packs for sample in pack) / (len(packs) * capacity)


def in_arrival_order(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of samples first-in-first-out: a pack is closed by the first that does not fit."""
    ends = np.cumsum(sizes)
    packs = []
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        end = int(np.searchsorted(ends, before + capacity, "right"))
        packs.append(list(range(first, end)))
        first = end
    return packs


def shares_of(packs: Sequence[Sequence[int]], sizes: Lengths, marked: npt.NDArray[np.bool_], per_step: int) -> Lengths:
    """Share of slots that marked samples have in each whole step of so many packs."""
    steps = [np.concatenate(packs[i : i + per_step]).astype(int) for i in range(0, len(packs) - per_step + 1, per_step)]
    return np.array([sizes[step][marked[step]].sum() / sizes[step].sum() for step in steps])
