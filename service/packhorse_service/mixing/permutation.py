"""Seeded permutations that are the same on every machine and under every library version.

Each element gets the key splitmix64(seed + i); the order is that of the keys. numpy's own generators
do not promise their streams across versions, and a resumed job must see the order it started with.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

__all__ = ["permutation", "seed_of"]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def seed_of(*parts: int | str) -> int:
    """Return a 64-bit seed, made from a path of names and numbers."""
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def permutation(n: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a permutation of 0 … n-1, int64 [n]."""
    state = np.uint64(seed) + GAMMA * np.arange(1, n + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return np.argsort(state ^ (state >> np.uint64(31)), kind="stable")
