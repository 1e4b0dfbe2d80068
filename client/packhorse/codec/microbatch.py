"""What one rank consumes in one forward: the packed row, or its slice of it, with both offset arrays.

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
    """One micro-batch as delivered to one rank.

    ``labels`` hold the next id also where ``loss_mask`` is 0 (a prompt, say): weigh the loss with the
    mask, or use ``masked_labels``. ``cu_seqlens`` is logical and ``cu_seqlens_padded`` physical, both of
    the whole row. ``step_loss_tokens`` is the exact denominator of a per-token loss over all ranks.

    It is equal to itself alone: arrays are never compared. ``msgspec.structs.replace`` copies it with other values.
    """

    tokens: Array  # int64 [T]; None on a pipeline stage that embeds nothing
    labels: Array  # int64 [T], ignore_index on padding and in fillers; None on a stage without a loss
    loss_mask: Array  # float32 [T], 0 or 1; None on a stage without a loss
    position_ids: Array  # int64 [T]; None where tokens are
    cu_seqlens: Array  # int32 [S+1]; None in the dense modes
    cu_seqlens_padded: Array  # int32 [S+1]; None in the dense modes
    padding_mask: Array = None  # bool [T], True = padding; where the contract asks, on every stage
    max_seqlen: int  # slots of the longest physical segment
    num_tokens: int  # real slots of the whole row
    num_loss_tokens: int  # supervised slots of the whole row
    local_loss_tokens: int  # supervised slots of this rank's slice
    step_tokens: int  # real slots of the whole step, all data-parallel ranks
    step_loss_tokens: int
    step: int
    index: int
    num_microbatches: int
    filler: bool
    ignore_index: int
    row_digest: bytes  # 16 bytes, as the server computed it for the whole row
    host_offsets: tuple[Any, Any]  # numpy int32 [S+1]: logical, physical; in every mode
    own_labels: bool = False
    partition: Partition = Partition.WHOLE
    context_size: int = 1
    context_rank: int = 0
    keys: tuple[SampleKey, ...] = ()

    @property
    def position(self) -> Position:
        return Position(self.step, self.index)

    @property
    def width(self) -> int:
        """Slots of the whole row."""
        return int(self.host_offsets[1][-1])

    @property
    def holds_whole_row(self) -> bool:
        return self.partition is Partition.WHOLE or self.context_size == 1

    def slots(self) -> Array:
        """int64, a numpy array: which slots of the row this rank holds; dense rows one after the other."""
        dense = self.cu_seqlens is None
        return held_slots(self.partition, self.host_offsets[1], self.context_size, self.context_rank, dense=dense)

    def masked_labels(self) -> Array:
        """int64 [T]: ``labels`` with ``ignore_index`` wherever nothing is trained on."""
        masked = self.labels.clone() if hasattr(self.labels, "clone") else self.labels.copy()
        masked[self.loss_mask == 0] = self.ignore_index
        return masked

    def computed_digest(self) -> bytes:
        """The row digest of what was delivered, to compare with ``row_digest``.

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
        """A copy on ``device``; asynchronous from pinned memory. Host counts stay where they are."""
        from packhorse.feeding.torch_arrays import to_device  # torch is an extra

        return to_device(self, device, non_blocking=non_blocking)


def _as_numpy(array: Array) -> Any:
    return array.numpy(force=True) if hasattr(array, "numpy") else array
