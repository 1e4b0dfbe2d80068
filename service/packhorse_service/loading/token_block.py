"""Tokenised samples become one ``TokenBlock``: joined once, checked as a whole.

n = samples of the block, N = their ids. A sample that fails a check keeps its place with no ids and a
``Fault``; only then is anything done sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import IGNORE_INDEX
from packhorse.errors import SourceError
from packhorse_service.loading.block import Fault, TokenBlock
from packhorse_service.sources.formats import TokenArrays, TokenColumns
from packhorse_service.sources.sample import BadSample
from packhorse_service.sources.tar.columnar import ColumnarSamples
from packhorse_service.sources.tar.grouping import Sample
from packhorse_service.sources.tar.reader import describe_member

__all__ = ["build_block", "build_columnar_block", "sample_fault"]

TOO_SHORT = "the sample is empty: it has {} ids and at least {} are needed; remove it"

NO_IDS = TokenArrays(np.empty(0, np.uint32))


def build_block(
    samples: Sequence[Sample], arrays: Sequence[TokenArrays | Fault], *, shard: str, vocab_size: int
) -> TokenBlock:
    """Join the ``arrays`` of ``samples`` (as many) into a block and check lengths, vocabulary and masks.

    Raises ``SourceError`` when only some samples bring labels: slots are counted differently for the two.
    """
    rows = list(arrays)
    brings_labels = _has_labels(samples, rows, shard)
    whole = [(index, row) for index, row in enumerate(rows) if not isinstance(row, Fault)]
    rules, min_ids = _rules(vocab_size), _min_ids(brings_labels)
    faults = [(index, TOO_SHORT.format(len(row.ids), min_ids)) for index, row in whole if len(row.ids) < min_ids]
    faults.extend(_faults(rules.ids, ((index, row.ids) for index, row in whole)))
    faults.extend(_faults(rules.labels, ((index, row.labels) for index, row in whole)))
    faults.extend(_faults(rules.loss_mask, ((index, row.loss_mask) for index, row in whole)))
    for index, reason in faults:
        rows[index] = sample_fault(index, samples[index], shard, BadSample(reason))
    return _block(
        [sample.key for sample in samples],
        _join_rows(rows, brings_labels),
        samples[-1].next_offset,
        [row for row in rows if isinstance(row, Fault)],
    )


def build_columnar_block(samples: ColumnarSamples, columns: TokenColumns, *, vocab_size: int) -> TokenBlock | None:
    """Return the block of ``samples``, whose ids are ``columns``; ``None`` if ``build_block`` finds faults in it."""
    rules = _rules(vocab_size)
    good = (
        columns.counts.min() >= _min_ids(columns.labels is not None)
        and rules.ids.holds(columns.ids)
        and rules.labels.holds(columns.labels)
        and rules.loss_mask.holds(columns.loss_mask)
    )
    return _block(samples.keys, columns, samples.next_offset, ()) if good else None


def sample_fault(index: int, sample: Sample, shard: str, error: BadSample) -> Fault:
    """Return the fault of sample ``index`` of a block."""
    return Fault(index, describe_member(shard, error.member or sample.first), str(error))


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule for the values of an array: 0 ≤ value < limit."""

    limit: int
    text: str  # with {value}
    ignored: int | None = None  # a value that is allowed as well

    def masked(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values, zeros in place of those that may be anything."""
        return values if self.ignored is None else np.where(values == self.ignored, 0, values)

    def holds(self, values: npt.NDArray[Any] | None) -> bool:
        """Return whether every value keeps the rule."""
        if values is None or not values.size:
            return True
        masked = self.masked(values)
        dtype = masked.dtype
        if dtype.kind == "i" and self.limit <= np.iinfo(dtype).max:
            # One look at each is enough: taken for unsigned ones, negative values are larger than all others.
            return bool(masked.view(dtype.str.replace("i", "u")).max() < self.limit)
        return bool(masked.min() >= 0 and masked.max() < self.limit)


class _Rules(NamedTuple):
    """The rules of a sample's arrays."""

    ids: _Rule
    labels: _Rule
    loss_mask: _Rule


def _rules(vocab_size: int) -> _Rules:
    vocabulary = f"is outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1}); is it the right tokenizer?"
    return _Rules(
        ids=_Rule(vocab_size, f"id {{value}} {vocabulary}"),
        labels=_Rule(vocab_size, f"label {{value}} {vocabulary}", IGNORE_INDEX),
        loss_mask=_Rule(2, "the loss mask holds {value}; it must hold 0 and 1 only"),
    )


def _faults(rule: _Rule, arrays: Iterable[tuple[int, npt.NDArray[Any] | None]]) -> Iterator[tuple[int, str]]:
    """Yield (sample, reason) for each sample whose array breaks the rule."""
    present = [(index, array) for index, array in arrays if array is not None]
    flat = concatenate([array for _, array in present])
    if rule.holds(flat):
        return
    flat = rule.masked(flat)
    ends = np.cumsum([len(array) for _, array in present])
    positions = np.flatnonzero((flat < 0) | (flat >= rule.limit))
    rows, firsts = np.unique(np.searchsorted(ends, positions, side="right"), return_index=True)
    for row, position in zip(rows.tolist(), positions[firsts].tolist(), strict=True):
        yield present[row][0], rule.text.format(value=flat[position])


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


def _min_ids(brings_labels: bool) -> int:
    """Return how many ids a sample needs to have one target."""
    return 1 if brings_labels else 2


def _has_labels(samples: Sequence[Sample], rows: Sequence[TokenArrays | Fault], shard: str) -> bool:
    labelled = {row.labels is not None: index for index, row in enumerate(rows) if not isinstance(row, Fault)}
    if len(labelled) == 2:
        raise SourceError(
            f"{describe_member(shard, samples[labelled[False]].first)}: the sample has no .labels.npy and sample "
            f"{samples[labelled[True]].key!r} has; all samples of a source bring labels, or none does"
        )
    return True in labelled


def _join_rows(rows: Sequence[TokenArrays | Fault], brings_labels: bool) -> TokenColumns:
    whole = [NO_IDS if isinstance(row, Fault) else row for row in rows]
    used = [row for row in whole if len(row.ids)]
    return TokenColumns(
        counts=np.array([len(row.ids) for row in whole], np.int64),
        ids=concatenate([row.ids for row in used]),
        loss_mask=_join_masks(used),
        labels=concatenate([row.labels for row in used if row.labels is not None]) if brings_labels else None,
    )


def _block(keys: Sequence[str], columns: TokenColumns, next_offset: int | None, faults: Sequence[Fault]) -> TokenBlock:
    offsets = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(columns.counts, out=offsets[1:])
    mask = None if columns.loss_mask is None else columns.loss_mask.astype(np.uint8, copy=False)
    labels = None
    if columns.labels is not None:
        signed = columns.labels.astype(np.int64)
        trained = signed != IGNORE_INDEX
        mask = trained.astype(np.uint8) if mask is None else mask * trained
        labels = np.where(trained, signed, 0).astype(np.uint32)
    # Checked ids are not negative: the commonest dtype need not be copied.
    signed_ids = columns.ids.dtype == np.int32
    tokens = columns.ids.view(np.uint32) if signed_ids else columns.ids.astype(np.uint32, copy=False)
    return TokenBlock(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        labels=labels,
        keys=tuple(keys),
        next_offset=next_offset,
        faults=tuple(faults),
        checksum=_checksum(keys, (tokens, offsets, mask, labels)),
    )


def _checksum(keys: Sequence[str], arrays: Iterable[npt.NDArray[Any] | None]) -> int:
    """Return the CRC-32 of a block's keys and arrays; never 0, which means none."""
    checksum = crc32("\0".join(keys).encode(errors="surrogatepass"))
    for array in arrays:
        checksum = crc32(b"" if array is None else array.data, checksum)
    return checksum or 1


def _join_masks(used: Sequence[TokenArrays]) -> npt.NDArray[Any] | None:
    """Return the loss mask [N] of a block, all ones where a sample brings none; ``None`` when none brings one."""
    if all(row.loss_mask is None for row in used):
        return None
    masks = [np.ones(len(row.ids), np.uint8) if row.loss_mask is None else row.loss_mask for row in used]
    return concatenate(masks)
