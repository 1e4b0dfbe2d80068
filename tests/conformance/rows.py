"""Samples, or offsets, through the service's and the client's own code to what a rank is handed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from packhorse import BatchContract, MicroBatch, ParallelLayout, Partition
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import ResolvedContract, resolve
from packhorse.rows.payload import AnyArray, join_arrays
from packhorse.rows.row import Row
from packhorse.wire.messages import BatchBody
from packhorse_service.framing import frame_step, view_key
from packhorse_service.loading.token_block import build_block
from packhorse_service.mixing.piece import Piece
from packhorse_service.sources.formats import TokenArrays
from packhorse_service.sources.tar.grouping import Sample
from packhorse_service.sources.tar.reader import TarMember
from tests.service.corpus import MemoryCorpus, build_row

VOCABULARY = 1 << 20


def contract_of(layout: ParallelLayout | None = None, *, seq_length: int, **fields: Any) -> ResolvedContract:
    """A contract that aligns nothing of its own accord, unless ``fields`` say so."""
    declared = BatchContract(**{"segment_multiple": 1, "padding_mask": True, **fields})
    return resolve(
        declared, layout or ParallelLayout(), seq_length=seq_length, global_batch_size=1, vocab_size=VOCABULARY
    )


def drawn(samples: Sequence[TokenArrays], seq_length: int) -> Iterator[Piece]:
    """Samples as the stream draws them, in order. Raises ``SourceError`` for one it cannot use."""
    stored = [Sample(str(i), {"npy": TarMember(f"{i}.npy", b"", 0, 0)}, None) for i in range(len(samples))]
    corpus = MemoryCorpus()
    corpus.add([[build_block(stored, samples, shard="memory", vocab_size=VOCABULARY)]], shuffle=False)
    stream = corpus.stream(seq_length)
    while (pieces := stream.draw()) is not None:
        yield from pieces


def deliver(samples: Sequence[TokenArrays], contract: ResolvedContract) -> MicroBatch:
    """One row of all these samples, as a rank without context parallelism receives it.

    The packer never overfills a row; samples that are given together may, and are refused.
    """
    row = build_row([(piece,) for piece in drawn(samples, contract.seq_length)], contract)
    return deliver_row(row, contract, ParallelLayout(), 0)


def samples_of(lengths: Iterable[int]) -> list[TokenArrays]:
    """Samples that fill so many slots each."""
    return [TokenArrays(np.ones(length, int), labels=np.ones(length, int)) for length in lengths]


def deliver_row(row: Row, contract: ResolvedContract, layout: ParallelLayout, rank: int) -> MicroBatch:
    """A row as ``rank`` of the layout receives it."""
    framed = frame_step(0, [[row]] * layout.data, b"", contract, layout, with_keys=False)
    at = layout.coordinates(rank)
    view = framed.views_of(view_key(at, contract, layout))[0]
    return Rebuilder(contract, layout, at.context).rebuild(view.body, memoryview(view.payload))


def receive_offsets(offsets: AnyArray, width: int, layout: ParallelLayout, rank: int) -> MicroBatch:
    """The offsets of a zigzag row of ``width`` slots, as a middle stage of context-parallel ``rank`` receives them."""
    table, payload = join_arrays({"cu_seqlens": offsets, "cu_seqlens_padded": offsets})
    body = BatchBody(
        step=0,
        index=0,
        num_tokens=width,
        num_loss_tokens=0,
        local_loss_tokens=0,
        step_tokens=width,
        step_loss_tokens=0,
        max_seqlen=width,
        slots=width // layout.context,
        filler=False,
        row_digest=bytes(16),
        arrays=table,
    )
    contract = contract_of(layout, seq_length=max(1, width), partition=Partition.ZIGZAG)
    return Rebuilder(contract, layout, rank).rebuild(body, memoryview(payload))


def row_with(logical: Sequence[int], physical: Sequence[int]) -> Row:
    """A row with these offsets: ids count up from 1, everything is trained on."""
    lengths, width = np.diff(logical), int(physical[-1])
    row = Row(
        np.zeros(width, np.uint32),
        np.full(int(np.count_nonzero(lengths)), 7, np.uint32),
        np.zeros(width, np.uint8),
        np.array(logical, np.int32),
        np.array(physical, np.int32),
    )
    real = np.flatnonzero(row.geometry.real)
    row.tokens[real] = np.arange(1, len(real) + 1)
    row.loss_mask[real] = 1
    return row


def micro_batch_with(logical: Sequence[int], physical: Sequence[int], **fields: Any) -> MicroBatch:
    """A whole row with these offsets, as torch tensors."""
    from packhorse.feeding.torch_arrays import to_torch

    contract = contract_of(seq_length=int(physical[-1]), **fields)
    return to_torch(deliver_row(row_with(logical, physical), contract, ParallelLayout(), 0), pin=False)
