"""Micro-batch of one rank: what one forward consumes, the packed row or a slice of it, with both offset arrays.

Shapes: T = local width in slots, S = segments of the row (never sliced). Dense modes deliver [MBS, T] and no
offsets.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from packhorse.contract.partition import Partition
from packhorse.contract.position import Position
from packhorse.errors import ContractError
from packhorse.rows.context_parallel import held_slots
from packhorse.rows.row import SampleKey
from packhorse.rows.row_digest import row_digest

__all__ = ["MicroBatch"]

# torch.Tensor, or numpy.ndarray where the Feed was asked for arrays="numpy". The base install has no torch.
Array = Any


class MicroBatch(Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """Micro-batch as delivered to one rank.

    Arrays are torch tensors (in pinned memory where there is CUDA), or numpy arrays of a ``Feed`` with
    ``arrays="numpy"``.
    Shapes: T = local width in slots, S = segments of the row. The dense modes deliver [MBS, T] and no offsets.

    ``labels`` hold the next id also where ``loss_mask`` is 0 (a prompt, say): weigh the loss with the mask, or use
    ``masked_labels``. ``cu_seqlens`` is logical and ``cu_seqlens_padded`` physical, both of the whole row.
    ``step_loss_tokens`` is the exact denominator of a per-token loss over all ranks; 0 where nothing is trained on.

    A micro-batch is equal to itself alone: arrays are never compared. ``msgspec.structs.replace`` copies it with
    other values.
    """

    tokens: Array
    """Input ids, int64 [T]; ``None`` on a pipeline stage that embeds nothing."""
    labels: Array
    """Next ids, int64 [T], ``ignore_index`` on padding and in fillers; ``None`` on a stage without a loss."""
    loss_mask: Array
    """Weights of the loss, float32 [T], 0 or 1; ``None`` on a stage without a loss."""
    position_ids: Array
    """Positions, int64 [T], that restart in each segment; ``None`` where ``tokens`` are."""
    cu_seqlens: Array
    """Logical offsets, int32 [S+1]: real slots alone; ``None`` in the dense modes."""
    cu_seqlens_padded: Array
    """Physical offsets, int32 [S+1]: padding too; ``None`` in the dense modes."""
    padding_mask: Array = None
    """Padding, bool [T], true on padding; where the contract asks for it, on every stage."""
    max_seqlen: int
    """Slots of the longest physical segment; of a row, where the contract fixes shapes."""
    num_tokens: int
    """Real slots of the whole row."""
    num_loss_tokens: int
    """Slots of the whole row that count in the loss."""
    local_loss_tokens: int
    """Slots of this rank's slice that count in the loss."""
    step_tokens: int
    """Real slots of the whole step, over all data-parallel ranks."""
    step_loss_tokens: int
    """Slots of the whole step that count in the loss, over all data-parallel ranks."""
    step: int
    """Number of the step, from 0."""
    index: int
    """Number of the micro-batch within the step, from 0."""
    num_microbatches: int
    """Micro-batches of each rank in a step."""
    filler: bool
    """True where nothing is trained on: a row that fills up the last step of a finite stream."""
    ignore_index: int
    """Label of what is not trained on, by contract."""
    row_digest: bytes
    """Digest of the whole row, 16 bytes, as the server computed it."""
    host_offsets: tuple[Any, Any]
    """Logical and physical offsets, numpy int32 [S+1], in every mode; the host may read them without waiting."""
    own_labels: bool = False
    """True where the source brought labels of its own."""
    partition: Partition = Partition.WHOLE
    """Way in which the row was cut for the context-parallel ranks."""
    context_size: int = 1
    """Context-parallel size."""
    context_rank: int = 0
    """Context-parallel rank of the reader."""
    keys: tuple[SampleKey, ...] = ()
    """Source, shard and key of each sample, in order, where the feed asked for them."""

    @property
    def position(self) -> Position:
        """Place in the stream: (step, index)."""
        return Position(self.step, self.index)

    @property
    def width(self) -> int:
        """Slots of the whole row; of all rows of a dense micro-batch."""
        return int(self.host_offsets[1][-1])

    @property
    def holds_whole_row(self) -> bool:
        """True where this rank was sent all slots of the row, false for a context-parallel slice."""
        return self.partition is Partition.WHOLE or self.context_size == 1

    def slots(self) -> Array:
        """Return the slots of the row that this rank holds, numpy int64; of dense rows, one after the other."""
        dense = self.cu_seqlens is None
        return held_slots(self.partition, self.host_offsets[1], self.context_size, self.context_rank, dense=dense)

    def masked_labels(self) -> Array:
        """Return a copy of ``labels``, int64 [T], with ``ignore_index`` wherever nothing is trained on."""
        masked = self.labels.clone() if hasattr(self.labels, "clone") else self.labels.copy()
        masked[self.loss_mask == 0] = self.ignore_index
        return masked

    def computed_digest(self) -> bytes:
        """Compute the row digest, 16 bytes, of what was delivered, to compare with ``row_digest``.

        Raises ``ContractError`` on a slice, and on a stage that holds only a part: a digest is of the whole row.
        """
        if not self.holds_whole_row or self.tokens is None or self.labels is None:
            raise ContractError("a row digest needs the whole row; this rank holds a part of it")
        return row_digest(
            _as_numpy(self.tokens).ravel(),
            None if self.filler else _as_numpy(self.labels).ravel(),
            _as_numpy(self.loss_mask).ravel(),
            *self.host_offsets,
            step=self.step,
            index=self.index,
            own_labels=self.own_labels,
        )

    def to(self, device: Any, *, non_blocking: bool = True) -> MicroBatch:
        """Return a copy with every torch tensor on ``device``; asynchronous from pinned memory.

        Counts and ``host_offsets`` stay on the host.
        """
        from packhorse.feeding.torch_arrays import to_device  # torch is an extra

        return to_device(self, device, non_blocking=non_blocking)


def _as_numpy(array: Array) -> Any:
    return array.numpy(force=True) if hasattr(array, "numpy") else array
