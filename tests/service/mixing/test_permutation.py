"""Permutations are the same on every machine, for ever: a resumed job sees the order it started with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.mixing.permutation import permutation, seed_of

SEEDS = st.integers(0, 2**64 - 1)


@given(n=st.integers(0, 300), seed=SEEDS)
def test_a_permutation_holds_every_number_once(n: int, seed: int) -> None:
    order = permutation(n, seed)
    assert sorted(order.tolist()) == list(range(n))
    assert order.dtype == np.dtype(np.int64)


@pytest.mark.parametrize(
    ("n", "seed", "order"),
    [
        (0, 0, []),
        (1, 5, [0]),
        (10, 0, [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]),
        (10, 1, [8, 4, 3, 7, 0, 1, 5, 9, 6, 2]),
        (16, 2**64 - 1, [12, 9, 10, 14, 2, 7, 3, 15, 4, 8, 11, 5, 13, 0, 1, 6]),
    ],
)
def test_the_order_of_a_seed_never_changes(n: int, seed: int, order: list[int]) -> None:
    assert permutation(n, seed).tolist() == order


def test_the_seed_of_a_path_of_names_never_changes() -> None:
    assert seed_of(0, "docs", 0) == 14218920193050027949
    assert seed_of(7, "a/b", 3) == 5869981806491481677


def test_the_keys_are_those_of_splitmix64() -> None:
    """The first outputs of the reference implementation for seed 0, whose ranks are the permutation."""
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert permutation(5, 0).tolist() == sorted(range(5), key=lambda i: reference[i])


def test_different_seeds_give_different_orders() -> None:
    assert len({tuple(permutation(64, seed).tolist()) for seed in range(200)}) == 200


@given(parts=st.lists(st.integers(0, 5) | st.sampled_from(["a", "b", "docs"]), min_size=1, max_size=4), data=st.data())
def test_a_seed_depends_on_every_part_of_its_path(parts: list[int | str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(parts) - 1))
    other = [*parts[:place], "changed", *parts[place + 1 :]]
    assert seed_of(*parts) == seed_of(*parts)
    assert seed_of(*parts) != seed_of(*other)
    assert 0 <= seed_of(*parts) < 2**64
