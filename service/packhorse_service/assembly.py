"""Tokenised samples become one ``TokenBlock``: joined once, checked as a whole.

n = samples of the block, N = their ids. A sample that fails a check keeps its place with no ids and a
``Fault``; only then is anything done sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from packhorse.errors import SourceError
from packhorse_service.blocks import Fault, TokenBlock
from packhorse_service.sources.formats import TokenArrays
from packhorse_service.sources.samples import BadSample, Sample
from packhorse_service.sources.tar import place_of

__all__ = ["assemble", "fault_of"]

IGNORE_INDEX = -100  # a label that is not trained on, as PyTorch's cross entropy has it

NOTHING = TokenArrays(np.empty(0, np.uint32))


def assemble(
    samples: Sequence[Sample], arrays: Sequence[TokenArrays | Fault], *, shard: str, vocab_size: int
) -> TokenBlock:
    """Join the ``arrays`` of ``samples`` (as many) into a block and check lengths, vocabulary and masks.

    Raises ``SourceError`` when only some samples bring labels: slots are counted differently for the two.
    """
    rows = list(arrays)
    brings_labels = _brings_labels(samples, rows, shard)
    found = [(index, _short(row.ids, brings_labels)) for index, row in enumerate(rows) if not isinstance(row, Fault)]
    faults = [(index, reason) for index, reason in found if reason]
    for column in _columns(rows, vocab_size):
        faults.extend(column.faults())
    for index, reason in faults:
        rows[index] = fault_of(index, samples[index], shard, BadSample(reason))
    return _join(samples, rows, brings_labels)


def fault_of(index: int, sample: Sample, shard: str, error: BadSample) -> Fault:
    """Return the fault of sample ``index`` of a block."""
    return Fault(index, place_of(shard, error.member or sample.first), str(error))


@dataclass(frozen=True, slots=True)
class _Column:
    """One array of all samples that have it, with the rule its values keep: 0 ≤ value < limit."""

    indices: Sequence[int]  # of the samples
    arrays: Sequence[npt.NDArray[Any]]
    limit: int
    rule: str  # with {value}
    ignored: int | None = None  # a value that is allowed as well

    def faults(self) -> Iterator[tuple[int, str]]:
        """Yield (sample, reason) for each sample that breaks the rule."""
        flat = concatenate(self.arrays)
        if self.ignored is not None:
            flat = np.where(flat == self.ignored, 0, flat)
        if not flat.size or (flat.min() >= 0 and flat.max() < self.limit):
            return
        ends = np.cumsum([len(array) for array in self.arrays])
        positions = np.flatnonzero((flat < 0) | (flat >= self.limit))
        rows, firsts = np.unique(np.searchsorted(ends, positions, side="right"), return_index=True)
        for row, position in zip(rows.tolist(), positions[firsts].tolist(), strict=True):
            yield self.indices[row], self.rule.format(value=flat[position])


def concatenate(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join integer arrays [n_i] to one [N]; mixed dtypes become int64, where numpy would make floats of some."""
    if not arrays:
        return np.empty(0, np.uint32)
    if len({array.dtype for array in arrays}) > 1:
        largest = np.iinfo(np.int64).max
        arrays = [
            (np.minimum(array, largest) if array.dtype == np.uint64 else array).astype(np.int64) for array in arrays
        ]
    return np.concatenate(arrays)


def _short(ids: npt.NDArray[Any], brings_labels: bool) -> str:
    least = 1 if brings_labels else 2
    if len(ids) >= least:
        return ""
    return f"the sample is empty: it has {len(ids)} ids and at least {least} are needed; remove it"


def _columns(rows: Sequence[TokenArrays | Fault], vocab_size: int) -> Iterator[_Column]:
    whole = [(index, row) for index, row in enumerate(rows) if not isinstance(row, Fault)]
    vocabulary = f"is outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1}); is it the right tokenizer?"
    yield _Column([i for i, _ in whole], [row.ids for _, row in whole], vocab_size, f"id {{value}} {vocabulary}")
    labelled = [(index, row.labels) for index, row in whole if row.labels is not None]
    yield _Column(*_unzip(labelled), vocab_size, f"label {{value}} {vocabulary}", IGNORE_INDEX)
    masked = [(index, row.loss_mask) for index, row in whole if row.loss_mask is not None]
    yield _Column(*_unzip(masked), 2, "the loss mask holds {value}; it must hold 0 and 1 only")


def _unzip(pairs: Sequence[tuple[int, npt.NDArray[Any]]]) -> tuple[list[int], list[npt.NDArray[Any]]]:
    return [index for index, _ in pairs], [array for _, array in pairs]


def _brings_labels(samples: Sequence[Sample], rows: Sequence[TokenArrays | Fault], shard: str) -> bool:
    labelled = {row.labels is not None: index for index, row in enumerate(rows) if not isinstance(row, Fault)}
    if len(labelled) == 2:
        raise SourceError(
            f"{place_of(shard, samples[labelled[False]].first)}: the sample has no .labels.npy and sample "
            f"{samples[labelled[True]].key!r} has; all samples of a source bring labels, or none does"
        )
    return True in labelled


def _join(samples: Sequence[Sample], rows: Sequence[TokenArrays | Fault], brings_labels: bool) -> TokenBlock:
    whole = [NOTHING if isinstance(row, Fault) else row for row in rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row.ids) for row in whole], out=offsets[1:])
    used = [row for row in whole if len(row.ids)]
    mask = _join_masks(used)
    labels = None
    if brings_labels:
        signed = concatenate([row.labels for row in used if row.labels is not None]).astype(np.int64)
        trained = signed != IGNORE_INDEX
        mask = trained.astype(np.uint8) if mask is None else mask * trained
        labels = np.where(trained, signed, 0).astype(np.uint32)
    tokens = concatenate([row.ids for row in used]).astype(np.uint32, copy=False)
    keys = tuple(sample.key for sample in samples)
    return TokenBlock(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        labels=labels,
        keys=keys,
        next_offset=samples[-1].next_offset,
        faults=tuple(row for row in rows if isinstance(row, Fault)),
        checksum=_checksum(keys, (tokens, offsets, mask, labels)),
    )


def _checksum(keys: Sequence[str], arrays: Iterable[npt.NDArray[Any] | None]) -> int:
    """CRC-32; never 0."""
    checksum = crc32("\0".join(keys).encode(errors="surrogatepass"))
    for array in arrays:
        checksum = crc32(b"" if array is None else array.data, checksum)
    return checksum or 1


def _join_masks(used: Sequence[TokenArrays]) -> npt.NDArray[np.uint8] | None:
    """Return the loss mask [N] of a block, all ones where a sample brings none; ``None`` when none brings one."""
    if all(row.loss_mask is None for row in used):
        return None
    masks = [np.ones(len(row.ids), np.uint8) if row.loss_mask is None else row.loss_mask for row in used]
    return concatenate(masks).astype(np.uint8, copy=False)
