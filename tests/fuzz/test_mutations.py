"""A hundred thousand inputs that are almost valid for every decoder that meets bytes from outside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest

from tests.fuzz.decoders import DECODERS, TREES, VALID, Framed, framed
from tests.fuzz.harness import INPUTS, decodes, stays_small
from tests.fuzz.mutation import bytes_like, trees_like

# numpy warns of headers that Python 2 wrote, and of names of dtypes that it gives up.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]


def inputs(name: str, count: int, seed: int) -> Iterator[bytes]:
    """Mutations of bytes; half of them of trees, or of one part of two, where there are such."""
    valid = VALID[name]
    whole = [item if isinstance(item, bytes) else framed(item.situation, item.first, item.second) for item in valid]
    if name in TREES:
        dump, trees = TREES[name]
        half = map(dump, trees_like(trees, count // 2, seed))
        return chain(half, bytes_like(whole, count - count // 2, seed))
    parts = [item for item in valid if isinstance(item, Framed)]
    if not parts:
        return bytes_like(whole, count, seed)
    each, left = divmod(count, 3 * len(parts))
    return chain(*(_one_part(item, each, seed) for item in parts), bytes_like(whole, each * len(parts) + left, seed))


def _one_part(item: Framed, count: int, seed: int) -> Iterator[bytes]:
    """Mutations of the first part alone, then of the second alone."""
    kept = item.kept
    for first in bytes_like([item.first[kept:]], count, seed):
        yield framed(item.situation, item.first[:kept] + first, item.second)
    for second in bytes_like([item.second[kept:]], count, seed):
        yield framed(item.situation, item.first, item.second[:kept] + second)


@pytest.mark.parametrize("name", DECODERS)
def test_valid_inputs_are_accepted(name: str) -> None:
    for item in VALID[name]:
        assert DECODERS[name].accepts(
            item if isinstance(item, bytes) else framed(item.situation, item.first, item.second)
        )


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_almost_valid_is_refused_in_words_or_read_soundly(name: str) -> None:
    accepted = decodes(DECODERS[name], inputs(name, INPUTS, seed=1))
    assert 0 < accepted < INPUTS


@pytest.mark.parametrize("name", DECODERS)
def test_no_input_takes_memory_for_what_it_merely_claims(name: str) -> None:
    stays_small(DECODERS[name], inputs(name, INPUTS, seed=2))
