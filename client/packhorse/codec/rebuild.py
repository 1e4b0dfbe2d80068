"""A rank's micro-batch from the arrays of its view: what ``views`` leaves out follows from what it sends.

Shapes: T = local slots, S = segments, L = segments of at least one real slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.errors import ContractError, ProtocolError
from packhorse.rows.context_parallel import held_slots
from packhorse.rows.geometry import Geometry
from packhorse.rows.payload import AnyArray, bits, from_bits, narrowest, split_arrays
from packhorse.rows.row import SampleKey
from packhorse.schema import decoder_for, unpack
from packhorse.wire.messages import BatchBody

__all__ = ["Rebuilder"]

Arrays = Mapping[str, AnyArray]  # by name, as they came
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Offsets = npt.NDArray[np.int32]
Padding = Sequence[slice | npt.NDArray[np.bool_]]  # which local slots hold no token

OFFSETS = ("cu_seqlens", "cu_seqlens_padded")
LABELS = frozenset({"labels", "own_labels", "last_targets"})
FIXED_DTYPES = {**dict.fromkeys(OFFSETS, "<i4"), "loss_mask": "|u1", "keys": "|u1"}
KEYS_LIMIT_BYTES = 4 << 20
KEYS_DECODER = decoder_for(tuple[tuple[str, str, str], ...])


class Rebuilder:
    """Rebuilder of the micro-batches of one reader; what is the same for all of a stream is worked out once."""

    def __init__(self, contract: ResolvedContract, layout: ParallelLayout, context_rank: int) -> None:
        rows = 1 if contract.packed else contract.micro_batch_size
        self._dtypes = FIXED_DTYPES | dict.fromkeys({"tokens", *LABELS}, narrowest(contract.vocab_size).str)
        self._slots_limit = contract.max_width * rows
        self._dense_rows = None if contract.packed else rows
        self._shares = 1 if contract.partition is Partition.WHOLE else layout.context  # that a row is cut into
        self._cut = partial(
            held_slots, contract.partition, context=layout.context, rank=context_rank, dense=not contract.packed
        )
        self._ignore_index = contract.ignore_index
        self._wants_padding_mask = contract.padding_mask
        self._constants: dict[str, Any] = {
            "num_microbatches": contract.num_microbatches(layout),
            "ignore_index": contract.ignore_index,
            "partition": contract.partition,
            "context_size": layout.context,
            "context_rank": context_rank,
        }

    def rebuild(self, body: BatchBody, payload: memoryview) -> MicroBatch:
        """Return a micro-batch of numpy arrays, in the dtypes of delivery.

        What a stage does not need did not travel, and is ``None``. Raises ``ProtocolError`` where the arrays do
        not fit one another.
        """
        arrays = split_arrays(body.arrays, payload)
        self._check(arrays, body)
        logical, physical = arrays["cu_seqlens"].astype(np.int32), arrays["cu_seqlens_padded"].astype(np.int32)
        geometry = self._geometry(logical, physical, body.slots)
        return MicroBatch(
            **self._per_slot(arrays, geometry, body),
            cu_seqlens=logical if self._dense_rows is None else None,
            cu_seqlens_padded=physical if self._dense_rows is None else None,
            max_seqlen=body.max_seqlen,
            num_tokens=body.num_tokens,
            num_loss_tokens=body.num_loss_tokens,
            local_loss_tokens=body.local_loss_tokens,
            step_tokens=body.step_tokens,
            step_loss_tokens=body.step_loss_tokens,
            step=body.step,
            index=body.index,
            filler=body.filler,
            row_digest=body.row_digest,
            host_offsets=(logical, physical),
            own_labels="own_labels" in arrays,
            keys=_keys(arrays),
            **self._constants,
        )

    def _per_slot(self, arrays: Arrays, geometry: Geometry, body: BatchBody) -> dict[str, Any]:
        """Return the fields that have a value for each slot: [T], or [MBS, T] in the dense modes."""
        slots = None if self._shares == 1 else self._held(geometry)
        padding = geometry.padding if slots is None else [~geometry.real[slots]]
        # One block, which the allocator keeps for the next row: smaller ones it gives back to the kernel, to be zeroed.
        buffer = np.empty((4, body.slots), np.int64)
        fields: dict[str, Any] = dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask"))
        if "tokens" in arrays:
            fields["tokens"] = _copied(arrays, "tokens", buffer[0])
            fields["position_ids"] = _positions(geometry, slots, buffer[1])
        if "loss_mask" in arrays:
            fields["labels"] = self._labels(arrays, geometry, padding, buffer[2], filler=body.filler)
            fields["loss_mask"] = _loss_mask(arrays, buffer[3].view(np.float32)[: body.slots])
        if self._wants_padding_mask:
            fields["padding_mask"] = _padding_mask(padding, body.slots)
        if self._dense_rows is not None:
            return {name: None if each is None else each.reshape(self._dense_rows, -1) for name, each in fields.items()}
        return fields

    def _check(self, arrays: Arrays, body: BatchBody) -> None:
        """Refuse arrays that are unknown, of another dtype or missing, and more slots than the contract has."""
        for entry in body.arrays:
            want = self._dtypes.get(entry.name)
            if want is None:
                raise ProtocolError(f"BATCH {body.step}.{body.index} has an unknown array {entry.name!r}")
            if entry.dtype != want:
                raise ProtocolError(f"BATCH has {entry.name} as {entry.dtype}, must be {want}")
        for name in OFFSETS:
            if name not in arrays:
                raise ProtocolError(f"BATCH {body.step}.{body.index} lacks the array {name!r}")
        if ("loss_mask" in arrays) != len(LABELS.intersection(arrays)):
            raise ProtocolError(
                f"BATCH {body.step}.{body.index} must have labels of one kind and loss_mask, or neither"
            )
        if body.slots > self._slots_limit:
            raise ProtocolError(f"BATCH has {body.slots} slots, at most {self._slots_limit} by contract")

    def _geometry(self, logical: Offsets, physical: Offsets, slots: int) -> Geometry:
        """Return the geometry of offsets; refuse those out of order, or that do not end where the slots do."""
        if len(logical) != len(physical) or len(logical) < 2 or logical[0] != 0 or physical[0] != 0:
            raise ProtocolError("offsets must start at 0 and have one length, of at least 2")
        geometry = Geometry(logical, physical)
        signs = geometry.lengths | geometry.gaps  # negative where one of the two is
        if signs[signs.argmin()] < 0:
            raise ProtocolError(
                "offsets must not decrease, and no segment's logical length may exceed its physical one"
            )
        widths = geometry.padded_lengths
        if self._dense_rows is not None and (len(widths) != self._dense_rows or (widths != widths[0]).any()):
            raise ProtocolError(f"offsets must be those of {self._dense_rows} dense rows of one width")
        if slots * self._shares != geometry.width:
            raise ProtocolError(f"BATCH has {slots} slots where its offsets end at {geometry.width}")
        if not slots:
            raise ProtocolError("BATCH has no slots; a row has at least one")
        return geometry

    def _held(self, geometry: Geometry) -> Longs:
        """Return the local slots of a row that was cut."""
        try:
            return self._cut(geometry.physical)
        except ContractError as error:
            raise ProtocolError(f"a row that cannot be cut: {error}") from error

    def _labels(self, arrays: Arrays, geometry: Geometry, padding: Padding, out: Longs, *, filler: bool) -> Longs:
        if filler:
            out.fill(self._ignore_index)
            return out
        if "last_targets" in arrays:
            _targets(arrays, geometry, out)
        else:
            _copied(arrays, "own_labels" if "own_labels" in arrays else "labels", out)
        for where in padding:
            out[where] = self._ignore_index
        return out


def _copied(arrays: Arrays, name: str, out: Longs) -> Longs:
    sent = arrays[name]
    if len(sent) != len(out):
        raise ProtocolError(f"{len(sent)} {name} for {len(out)} slots")
    out[:] = sent
    return out


def _targets(arrays: Arrays, geometry: Geometry, out: Longs) -> Longs:
    """Write the target of each slot: the next token, and the last target at the end of a segment."""
    tokens, targets, last_slots = arrays.get("tokens"), arrays["last_targets"], geometry.last_slots
    if tokens is None or len(tokens) != len(out) or len(targets) != len(last_slots):
        raise ProtocolError(f"labels do not fit {len(out)} slots in {len(last_slots)} segments")
    out[:-1] = tokens[1:]
    out.put(last_slots, targets)
    return out


def _positions(geometry: Geometry, slots: Longs | None, out: Longs) -> Longs:
    return geometry.write_positions(out) if slots is None else geometry.position_ids.take(slots, out=out)


def _loss_mask(arrays: Arrays, out: Floats) -> Floats:
    sent = arrays["loss_mask"]
    if sent.tobytes() == _all_set(len(out)):  # as of most rows
        out.fill(1)
    else:
        out[:] = from_bits(sent, len(out))
    return out


@lru_cache(maxsize=4)
def _all_set(count: int) -> bytes:
    return bits(np.ones(count)).tobytes()


def _padding_mask(padding: Padding, slots: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(slots, np.bool_)
    for where in padding:
        mask[where] = True
    return mask


def _keys(arrays: Arrays) -> tuple[SampleKey, ...]:
    if "keys" not in arrays:
        return ()
    keys: tuple[SampleKey, ...] = KEYS_DECODER(unpack(arrays["keys"].tobytes(), KEYS_LIMIT_BYTES), "keys")
    return keys
