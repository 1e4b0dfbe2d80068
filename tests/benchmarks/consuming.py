"""What every consumer does with its micro-batches: touch each token, count, and look closely at one now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

import numpy as np

from tests.benchmarks.children import be_child

__all__ = ["IGNORE_INDEX", "Tally", "consume", "looked_at", "tally_of"]

CHECK_EVERY = 200  # micro-batches, of which one is looked at closely
FIELDS = {
    "tokens": "int64",
    "labels": "int64",
    "position_ids": "int64",
    "loss_mask": "float32",
    "cu_seqlens": "int32",
    "cu_seqlens_padded": "int32",
}
IGNORE_INDEX = -100


@dataclass(slots=True)
class Tally:
    """What was consumed. A sample of n ids is n - 1 tokens: the last is only a target."""

    samples: int = 0
    tokens: int = 0
    token_sum: int = 0

    def __add__(self, other: Self) -> Tally:
        return Tally(self.samples + other.samples, self.tokens + other.tokens, self.token_sum + other.token_sum)


def consume(source: Callable[[dict[str, Any]], Iterator[Tally]]) -> NoReturn:
    """Be a child that consumes all that ``source`` gives for its task, a tally for each micro-batch."""

    def work(task: dict[str, Any]) -> dict[str, Any]:
        seen, first = Tally(), 0.0
        for of_one in source(task):
            first = first or time.monotonic()
            seen += of_one
        return {"seen": asdict(seen), "first": first, "done": time.monotonic()}

    be_child(work)


def tally_of(tokens: Any, cu_seqlens: Any) -> Tally:
    """Of a full micro-batch, numpy or torch; padding is id 0."""
    offsets = np.asarray(cu_seqlens)
    return Tally(int(np.count_nonzero(np.diff(offsets))), int(offsets[-1]), int(tokens.sum()))


def looked_at(number: int, *arrays: Any) -> None:
    """Look closely at some: all of ``FIELDS`` are there, in their dtypes, and agree with each other."""
    if number % CHECK_EVERY:
        return
    for (name, dtype), array in zip(FIELDS.items(), arrays, strict=True):
        assert str(array.dtype).endswith(dtype), f"{name} is {array.dtype}"
    tokens, labels, positions, mask, logical, physical = (np.asarray(array) for array in arrays)
    assert len(tokens) == len(labels) == len(positions) == len(mask) == physical[-1]
    real = np.zeros(len(tokens), np.bool_)
    for begin, length in zip(physical.tolist(), np.diff(logical).tolist(), strict=False):
        end = begin + length
        real[begin:end] = True
        assert np.array_equal(labels[begin : end - 1], tokens[begin + 1 : end]), "labels are the next token"
        assert np.array_equal(positions[begin:end], np.arange(length)), "positions count from 0"
    assert np.array_equal(mask == 1, real), "the mask is 1 on tokens"
    assert np.array_equal(labels != IGNORE_INDEX, real), "padding has no labels"
