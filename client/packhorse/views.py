"""A rank's view of a row, to and from the arrays on the wire.

What can be rebuilt exactly does not travel: positions follow from the offsets; the labels of a whole row
follow from its tokens and the last target of each segment; ids are 16 bits wide where the vocabulary
allows; the loss mask is bits. A context-parallel slice carries its labels, as its neighbours are elsewhere.

Shapes: T = local slots, S = segments, L = segments of at least one real slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.context_parallel import Partition, local_slots
from packhorse.contract import ResolvedContract
from packhorse.errors import ContractError, ProtocolError
from packhorse.layout import ParallelLayout
from packhorse.microbatch import MicroBatch
from packhorse.payload import AnyArray, ArrayEntry, bits, from_bits, join_arrays, narrowest, split_arrays
from packhorse.row import Geometry, Row, SampleKey
from packhorse.schema import decoder_for, pack, unpack
from packhorse.wire import BatchBody

__all__ = ["view_arrays", "view_microbatch"]

KEYS_LIMIT_BYTES = 4 << 20
KEYS_DECODER = decoder_for(tuple[tuple[str, str, str], ...])


def view_arrays(
    row: Row, contract: ResolvedContract, layout: ParallelLayout, context_rank: int, *, with_keys: bool = False
) -> tuple[tuple[ArrayEntry, ...], bytearray, int]:
    """One rank's arrays of a row: their table, the payload that holds them, and T."""
    ids = narrowest(contract.vocab_size)
    arrays: dict[str, AnyArray] = {"cu_seqlens": row.cu_seqlens, "cu_seqlens_padded": row.cu_seqlens_padded}
    if layout.context == 1 or contract.partition is Partition.WHOLE:
        tokens, mask = row.tokens, row.loss_mask
        if row.labels is None:
            arrays["last_targets"] = row.last_targets.astype(ids)
        else:
            arrays["own_labels"] = row.labels.astype(ids)
    else:
        slots = local_slots(contract.partition, row.cu_seqlens_padded, layout.context, context_rank)
        tokens, mask = row.tokens[slots], row.loss_mask[slots]
        arrays["own_labels" if row.labels is not None else "labels"] = row.targets()[slots].astype(ids)
    arrays["tokens"] = tokens.astype(ids)
    arrays["loss_mask"] = bits(mask)
    if with_keys:
        arrays["keys"] = np.frombuffer(pack(row.keys), np.uint8)
    table, buffer = join_arrays(arrays)
    return table, buffer, len(tokens)


def view_microbatch(
    body: BatchBody, payload: memoryview, contract: ResolvedContract, layout: ParallelLayout, context_rank: int
) -> MicroBatch:
    """Rebuild a micro-batch, as numpy arrays in the dtypes of delivery.

    Raises ``ProtocolError`` where the arrays do not fit one another.
    """
    arrays = split_arrays(body.arrays, payload)
    _check_dtypes(arrays, narrowest(contract.vocab_size))
    try:
        logical, physical = arrays["cu_seqlens"], arrays["cu_seqlens_padded"]
        _check_offsets(logical, physical)
        # Before anything is made of that size.
        parts = 1 if contract.partition is Partition.WHOLE else layout.context
        if len(arrays["tokens"]) * parts != physical[-1]:
            raise ProtocolError(f"BATCH has {len(arrays['tokens'])} tokens where its offsets end at {physical[-1]}")
        slots = _slots(contract, physical, layout, context_rank)
        geometry = Geometry(logical, physical)
        real = geometry.real if slots is None else geometry.real[slots]
        tokens, mask = _tokens(arrays, len(real), body)
        labels = _labels(arrays, tokens, real, geometry, contract.ignore_index, filler=body.filler)
    except KeyError as missing:
        raise ProtocolError(f"BATCH {body.step}.{body.index} lacks the array {missing}") from missing
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=mask,
        position_ids=geometry.position_ids if slots is None else geometry.position_ids[slots],
        cu_seqlens=np.array(logical, dtype=np.int32),
        cu_seqlens_padded=np.array(physical, dtype=np.int32),
        max_seqlen=body.max_seqlen,
        num_tokens=body.num_tokens,
        num_loss_tokens=body.num_loss_tokens,
        local_loss_tokens=int(np.count_nonzero(mask)),
        step_tokens=body.step_tokens,
        step_loss_tokens=body.step_loss_tokens,
        step=body.step,
        index=body.index,
        num_microbatches=contract.num_microbatches(layout),
        filler=body.filler,
        ignore_index=contract.ignore_index,
        row_digest=body.row_digest,
        own_labels="own_labels" in arrays,
        partition=contract.partition,
        context_size=layout.context,
        context_rank=context_rank,
        keys=_keys(arrays),
    )


FIXED_DTYPES = {"cu_seqlens": "<i4", "cu_seqlens_padded": "<i4", "loss_mask": "|u1", "keys": "|u1"}


def _check_dtypes(arrays: dict[str, AnyArray], ids: np.dtype[np.generic]) -> None:
    for name, array in arrays.items():
        if array.dtype != np.dtype(FIXED_DTYPES.get(name, ids)):
            raise ProtocolError(f"BATCH has {name} as {array.dtype}, must be {FIXED_DTYPES.get(name, ids)}")


def _check_offsets(logical: AnyArray, physical: AnyArray) -> None:
    if len(logical) != len(physical) or len(logical) < 2 or logical[0] != 0 or physical[0] != 0:
        raise ProtocolError("offsets must start at 0 and have one length, of at least 2")
    real, padded = np.diff(logical.astype(np.int64)), np.diff(physical.astype(np.int64))
    if np.any(real < 0) or np.any(padded < real):
        raise ProtocolError("offsets must not decrease, and no segment's logical length may exceed its physical one")


def _slots(
    contract: ResolvedContract, physical: AnyArray, layout: ParallelLayout, context_rank: int
) -> npt.NDArray[np.int64] | None:
    """The local slots; ``None`` stands for the whole row in order."""
    if layout.context == 1 or contract.partition is Partition.WHOLE:
        return None
    try:
        return local_slots(contract.partition, physical, layout.context, context_rank)
    except ContractError as error:
        raise ProtocolError(f"a row that cannot be cut: {error}") from error


def _tokens(arrays: dict[str, AnyArray], width: int, body: BatchBody) -> tuple[Any, Any]:
    tokens = arrays["tokens"]
    if not len(tokens) == width == body.slots:
        raise ProtocolError(f"{len(tokens)} tokens where the offsets leave {width} and the header says {body.slots}")
    return tokens.astype(np.int64), from_bits(arrays["loss_mask"], width).astype(np.float32)


def _labels(
    arrays: dict[str, AnyArray],
    tokens: npt.NDArray[np.int64],
    real: npt.NDArray[np.bool_],
    geometry: Geometry,
    ignore_index: int,
    *,
    filler: bool,
) -> npt.NDArray[np.int64]:
    if filler:
        return np.full_like(tokens, ignore_index)
    sent = arrays.get("own_labels", arrays.get("labels"))
    if sent is None:
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        targets = arrays["last_targets"]
        if len(targets) != len(geometry.last_slots):
            raise ProtocolError(f"{len(targets)} last targets for {len(geometry.last_slots)} segments")
        labels[geometry.last_slots] = targets
    elif len(sent) == len(tokens):
        labels = sent.astype(np.int64)
    else:
        raise ProtocolError(f"{len(sent)} labels for {len(tokens)} tokens")
    labels[~real] = ignore_index
    return labels


def _keys(arrays: dict[str, AnyArray]) -> tuple[SampleKey, ...]:
    if "keys" not in arrays:
        return ()
    keys: tuple[SampleKey, ...] = KEYS_DECODER(unpack(arrays["keys"].tobytes(), KEYS_LIMIT_BYTES), "keys")
    return keys
