"""A rank's view of a row, to and from the arrays on the wire.

What can be rebuilt exactly does not travel: positions follow from the offsets; the labels of a whole row
follow from its tokens and the last target of each segment; ids are 16 bits wide where the vocabulary
allows; the loss mask is bits. A context-parallel slice carries its labels, as its neighbours are elsewhere.

Shapes: T = local slots, S = segments, L = segments of at least one real slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.context_parallel import Partition, held_slots
from packhorse.contract import ResolvedContract
from packhorse.errors import ContractError, ProtocolError
from packhorse.layout import ParallelLayout
from packhorse.microbatch import MicroBatch
from packhorse.payload import DTYPES, AnyArray, ArrayEntry, bits, from_bits, join_arrays, narrowest, split_arrays
from packhorse.row import Geometry, Row, SampleKey
from packhorse.schema import decoder_for, pack, unpack
from packhorse.wire import BatchBody

__all__ = ["EVERYTHING", "View", "view_arrays", "view_microbatch"]

Slots = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Padding = Sequence[slice | npt.NDArray[np.bool_]]  # which local slots hold no token

# The fields that travel; a pipeline stage may need fewer.
EVERYTHING = frozenset({"tokens", "position_ids", "labels", "loss_mask"})
KEYS_LIMIT_BYTES = 4 << 20
KEYS_DECODER = decoder_for(tuple[tuple[str, str, str], ...])


class View(NamedTuple):
    """One rank's part of a row, as arrays in one payload."""

    table: tuple[ArrayEntry, ...]
    payload: bytearray
    slots: int  # local slots
    loss_tokens: int  # supervised ones among them


def view_arrays(
    row: Row,
    contract: ResolvedContract,
    layout: ParallelLayout,
    context_rank: int,
    needs: Collection[str] = EVERYTHING,
    *,
    with_keys: bool = False,
) -> View:
    """One rank's arrays of a row; ``needs`` names the fields that its pipeline stage uses."""
    ids = narrowest(contract.vocab_size)
    slots = _slots(contract, row.cu_seqlens_padded, layout, context_rank)
    arrays: dict[str, AnyArray] = {"cu_seqlens": row.cu_seqlens, "cu_seqlens_padded": row.cu_seqlens_padded}
    if "tokens" in needs:
        arrays["tokens"] = (row.tokens if slots is None else row.tokens[slots]).astype(ids, copy=False)
    if "labels" in needs:
        arrays.update(_label_arrays(row, slots, ids, derivable="tokens" in needs))
    mask = None if slots is None else row.loss_mask[slots]
    if "loss_mask" in needs:
        arrays["loss_mask"] = row.mask_bits if mask is None else bits(mask)
    if with_keys:
        arrays["keys"] = np.frombuffer(pack(row.keys), np.uint8)
    if mask is None:
        return View(*join_arrays(arrays), row.width, row.num_loss_tokens)
    return View(*join_arrays(arrays), len(mask), int(np.count_nonzero(mask)))


def _label_arrays(row: Row, slots: Slots | None, ids: np.dtype[np.generic], *, derivable: bool) -> dict[str, AnyArray]:
    """Labels as they travel: only last targets, where the rest follows from the tokens that are sent too."""
    if slots is None and row.labels is None and derivable:
        return {"last_targets": row.last_targets.astype(ids, copy=False)}
    targets = row.targets() if slots is None else row.targets()[slots]
    return {"labels" if row.labels is None else "own_labels": targets.astype(ids, copy=False)}


def view_microbatch(
    body: BatchBody, payload: memoryview, contract: ResolvedContract, layout: ParallelLayout, context_rank: int
) -> MicroBatch:
    """Rebuild a micro-batch, as numpy arrays in the dtypes of delivery.

    What a stage does not need did not travel, and is ``None``. Raises ``ProtocolError`` where the arrays do
    not fit one another.
    """
    arrays = split_arrays(body.arrays, payload)
    _check_arrays(arrays, body, contract)
    logical, physical = np.array(arrays["cu_seqlens"], np.int32), np.array(arrays["cu_seqlens_padded"], np.int32)
    geometry = _geometry(logical, physical, None if contract.packed else contract.micro_batch_size)
    # Before anything is made of that size.
    parts = 1 if contract.partition is Partition.WHOLE else layout.context
    if body.slots * parts != physical[-1]:
        raise ProtocolError(f"BATCH has {body.slots} slots where its offsets end at {physical[-1]}")
    slots = _slots(contract, physical, layout, context_rank)
    padding = geometry.padding if slots is None else [~geometry.real[slots]]
    longs, floats = _room(body.slots, arrays)
    tokens = _tokens(arrays, longs.pop()) if "tokens" in arrays else None
    positions = _positions(geometry, slots, longs.pop()) if "tokens" in arrays else None
    labels = _labels(arrays, longs.pop(), padding, geometry, contract, body) if "loss_mask" in arrays else None
    mask = _loss_mask(arrays, floats) if "loss_mask" in arrays else None
    rows = (-1,) if contract.packed else (contract.micro_batch_size, -1)
    return MicroBatch(
        tokens=_shaped(tokens, rows),
        labels=_shaped(labels, rows),
        loss_mask=_shaped(mask, rows),
        position_ids=_shaped(positions, rows),
        cu_seqlens=logical if contract.packed else None,
        cu_seqlens_padded=physical if contract.packed else None,
        padding_mask=_shaped(_padding_mask(padding, body.slots) if contract.padding_mask else None, rows),
        max_seqlen=body.max_seqlen,
        num_tokens=body.num_tokens,
        num_loss_tokens=body.num_loss_tokens,
        local_loss_tokens=body.local_loss_tokens,
        step_tokens=body.step_tokens,
        step_loss_tokens=body.step_loss_tokens,
        step=body.step,
        index=body.index,
        num_microbatches=contract.num_microbatches(layout),
        filler=body.filler,
        ignore_index=contract.ignore_index,
        row_digest=body.row_digest,
        host_offsets=(logical, physical),
        own_labels="own_labels" in arrays,
        partition=contract.partition,
        context_size=layout.context,
        context_rank=context_rank,
        keys=_keys(arrays),
    )


def _shaped(array: AnyArray | None, rows: tuple[int, ...]) -> AnyArray | None:
    return array if array is None or len(rows) == 1 else array.reshape(rows)


OFFSETS = ("cu_seqlens", "cu_seqlens_padded")
LABELS = frozenset({"labels", "own_labels", "last_targets"})
FIXED_DTYPES = {"cu_seqlens": "<i4", "cu_seqlens_padded": "<i4", "loss_mask": "|u1", "keys": "|u1"}


@cache
def _dtypes(ids: np.dtype[np.generic]) -> Mapping[str, np.dtype[np.generic]]:
    """Of each array that may come."""
    return {name: DTYPES[dtype] for name, dtype in FIXED_DTYPES.items()} | dict.fromkeys({*LABELS, "tokens"}, ids)


def _check_arrays(arrays: Mapping[str, AnyArray], body: BatchBody, contract: ResolvedContract) -> None:
    """Every array in its own dtype, the offsets among them, and no more slots than the contract has."""
    dtypes = _dtypes(narrowest(contract.vocab_size))
    for name, array in arrays.items():
        want = dtypes.get(name)
        if want is None:
            raise ProtocolError(f"BATCH {body.step}.{body.index} has an unknown array {name!r}")
        if array.dtype != want:
            raise ProtocolError(f"BATCH has {name} as {array.dtype}, must be {want}")
    for name in OFFSETS:
        if name not in arrays:
            raise ProtocolError(f"BATCH {body.step}.{body.index} lacks the array {name!r}")
    if ("loss_mask" in arrays) == LABELS.isdisjoint(arrays):
        raise ProtocolError(f"BATCH {body.step}.{body.index} has labels without loss_mask, or loss_mask without labels")
    rows = 1 if contract.packed else contract.micro_batch_size
    if body.slots > contract.max_width * rows:
        raise ProtocolError(f"BATCH has {body.slots} slots, at most {contract.max_width * rows} by contract")


def _geometry(logical: AnyArray, physical: AnyArray, dense_rows: int | None) -> Geometry:
    if len(logical) != len(physical) or len(logical) < 2 or logical[0] != 0 or physical[0] != 0:
        raise ProtocolError("offsets must start at 0 and have one length, of at least 2")
    geometry = Geometry(logical, physical)
    if np.minimum.reduce(geometry.lengths) < 0 or np.minimum.reduce(geometry.gaps) < 0:
        raise ProtocolError("offsets must not decrease, and no segment's logical length may exceed its physical one")
    widths = geometry.padded_lengths
    if dense_rows is not None and (len(widths) != dense_rows or (widths != widths[0]).any()):
        raise ProtocolError(f"offsets must be those of {dense_rows} dense rows of one width")
    return geometry


def _slots(
    contract: ResolvedContract, physical: npt.NDArray[np.int32], layout: ParallelLayout, context_rank: int
) -> Slots | None:
    """The local slots; ``None`` stands for the whole row in order."""
    if layout.context == 1 or contract.partition is Partition.WHOLE:
        return None
    try:
        return held_slots(contract.partition, physical, layout.context, context_rank, dense=not contract.packed)
    except ContractError as error:
        raise ProtocolError(f"a row that cannot be cut: {error}") from error


def _room(slots: int, arrays: Mapping[str, AnyArray]) -> tuple[list[Ids], Floats]:
    """An int64 array each for tokens, positions and labels, and a float32 one for the mask; of those that come.

    In one block, which the allocator keeps for the next row: smaller ones it gives back to the kernel, to be zeroed.
    """
    supervised = "loss_mask" in arrays
    longs = 2 * ("tokens" in arrays) + supervised
    block = np.empty((2 * longs + supervised) * slots, np.float32)
    wide = block[: 2 * longs * slots].view(np.int64).reshape(longs, slots)
    return list(wide), block[2 * longs * slots :]


def _tokens(arrays: Mapping[str, AnyArray], out: Ids) -> Ids:
    if len(arrays["tokens"]) != len(out):
        raise ProtocolError(f"{len(arrays['tokens'])} tokens for {len(out)} slots")
    out[:] = arrays["tokens"]
    return out


def _positions(geometry: Geometry, slots: Slots | None, out: Ids) -> Ids:
    if slots is None:
        return geometry.write_positions(out)
    return geometry.position_ids.take(slots, out=out)


def _loss_mask(arrays: Mapping[str, AnyArray], out: Floats) -> Floats:
    out[:] = from_bits(arrays["loss_mask"], len(out))
    return out


def _padding_mask(padding: Padding, slots: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(slots, np.bool_)
    for where in padding:
        mask[where] = True
    return mask


def _labels(
    arrays: Mapping[str, AnyArray],
    out: Ids,
    padding: Padding,
    geometry: Geometry,
    contract: ResolvedContract,
    body: BatchBody,
) -> Ids:
    if body.filler:
        out[:] = contract.ignore_index
        return out
    sent, targets = arrays.get("own_labels", arrays.get("labels")), arrays.get("last_targets")
    tokens = arrays.get("tokens")
    if sent is not None and len(sent) == len(out):
        out[:] = sent
    elif targets is not None and tokens is not None and len(targets) == len(geometry.last_slots):
        out[:-1] = tokens[1:]
        out[geometry.last_slots] = targets
    else:
        raise ProtocolError(f"labels do not fit {len(out)} slots in {len(geometry.last_slots)} segments")
    for where in padding:
        out[where] = contract.ignore_index
    return out


def _keys(arrays: Mapping[str, AnyArray]) -> tuple[SampleKey, ...]:
    if "keys" not in arrays:
        return ()
    keys: tuple[SampleKey, ...] = KEYS_DECODER(unpack(arrays["keys"].tobytes(), KEYS_LIMIT_BYTES), "keys")
    return keys
