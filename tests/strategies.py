"""Hypothesis strategies that several tests share: layouts, contracts that hold, and rows of random samples.

A row is laid out twice: here in plain Python lists, slot by slot from the words of the design, and by the
code under test. The lists are the oracle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, permutations, product

import numpy as np
from hypothesis import strategies as st

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.codec.views import view_arrays
from packhorse.contract.batch_contract import (
    AttentionOffsets,
    BatchContract,
    LossReduction,
    Objective,
    Packing,
    ReaderPolicy,
    Remainder,
    ResolvedContract,
    TailPadding,
    resolve,
)
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import ORIGIN
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, Stack, TrainerFacts
from packhorse.rows.row import Row, SampleKey
from packhorse.wire.messages import Batch, BatchBody, decode, encode

__all__ = [
    "ATTEMPT",
    "RowCase",
    "Sample",
    "Slots",
    "body_and_payload",
    "declared_contracts",
    "deliver",
    "lay_out",
    "layouts",
    "resolved_contracts",
    "row_cases",
    "row_of",
    "trainer_facts",
    "unit_of",
]

ATTEMPT = b"attempt!"
ORDERS = ["-".join(axes) for axes in permutations(("tp", "cp", "dp", "pp"))]
STEP_TOKENS, STEP_LOSS_TOKENS = 5000, 4000  # of a step that the row is one micro-batch of


def layouts(max_degree: int = 4, context: Sequence[int] = (1, 2, 3, 4)) -> st.SearchStrategy[ParallelLayout]:
    """Layouts of every order, with and without sequence parallelism."""
    degrees = st.integers(1, max_degree)
    return st.builds(
        ParallelLayout,
        data=degrees,
        context=st.sampled_from(context),
        tensor=degrees,
        pipeline=degrees,
        sequence_parallel=st.booleans(),
        order=st.sampled_from(ORDERS),
    )


def unit_of(partition: Partition, context: int) -> int:
    """What each segment's length is a multiple of: 2·CP, or CP for contiguous slices; nothing at CP 1."""
    if context == 1:
        return 1
    return context if partition is Partition.CONTIGUOUS else 2 * context


@st.composite
def resolved_contracts(draw: st.DrawFn, layout: ParallelLayout) -> ResolvedContract:
    """Contracts that break no rule on ``layout``, and draw no warning."""
    partition = draw(st.sampled_from(Partition))
    segment_multiple = unit_of(partition, layout.context) * draw(st.integers(1, 3))
    sequence_parallel = layout.context * layout.tensor if layout.sequence_parallel and layout.tensor > 1 else 1
    pack_multiple = sequence_parallel * draw(st.sampled_from((1, 2, 3, 8)))
    objective = draw(st.sampled_from(Objective))
    reductions = [r for r in LossReduction if objective is Objective.PRETRAIN or r is not LossReduction.MEAN]
    vocab_size = draw(st.sampled_from((50, 65_535, 65_536, 65_537, 200_000)))
    return ResolvedContract(
        seq_length=math.lcm(segment_multiple, pack_multiple) * draw(st.integers(1, 5)),
        micro_batch_size=1,
        global_batch_size=layout.data * draw(st.integers(1, 4)),
        packing=Packing.ONLINE,
        isolate_documents=True,
        partition=partition,
        readers=ReaderPolicy.ALL,
        evaluation_context=layout.context,
        segment_multiple=segment_multiple,
        pack_multiple=pack_multiple,
        static_shapes=False,
        pad_to_max_length=draw(st.booleans()),
        pad_cu_seqlens=False,
        max_segments=None,
        tail_padding=draw(st.sampled_from(TailPadding)),
        objective=objective,
        loss_reduction=draw(st.sampled_from(reductions)),
        remainder=draw(st.sampled_from(Remainder)),
        attention_offsets=AttentionOffsets.PHYSICAL,
        padding_mask=draw(st.booleans()),
        vocab_size=vocab_size,
        pad_id=draw(st.sampled_from((0, 1, vocab_size - 1))),
        ignore_index=draw(st.sampled_from((-100, -1))),
    )


def declared_contracts() -> st.SearchStrategy[BatchContract]:
    """Declarations with any fields left out; they need not hold."""
    sizes = st.none() | st.integers(1, 1 << 40)
    numbers = st.none() | st.integers(-(1 << 40), 1 << 40)
    flags = st.none() | st.booleans()
    return st.builds(
        BatchContract,
        seq_length=sizes,
        micro_batch_size=sizes,
        global_batch_size=sizes,
        packing=st.none() | st.sampled_from(Packing),
        isolate_documents=flags,
        partition=st.none() | st.sampled_from(Partition),
        readers=st.none() | st.sampled_from(ReaderPolicy),
        evaluation_context=sizes,
        segment_multiple=sizes,
        pack_multiple=sizes,
        static_shapes=flags,
        pad_to_max_length=flags,
        pad_cu_seqlens=flags,
        max_segments=sizes,
        tail_padding=st.none() | st.sampled_from(TailPadding),
        objective=st.none() | st.sampled_from(Objective),
        loss_reduction=st.none() | st.sampled_from(LossReduction),
        remainder=st.none() | st.sampled_from(Remainder),
        attention_offsets=st.none() | st.sampled_from(AttentionOffsets),
        padding_mask=flags,
        vocab_size=sizes,
        pad_id=numbers,
        ignore_index=numbers,
        trainer=st.none() | trainer_facts(),
    )


def trainer_facts() -> st.SearchStrategy[TrainerFacts]:
    """Facts of every type on the wire, any of them left out."""
    return st.builds(
        TrainerFacts,
        stack=st.none() | st.sampled_from(Stack),
        world_size=st.none() | st.integers(1, 1 << 40),
        model_family=st.none() | st.text(max_size=20),
        megatron_ddp=st.none() | st.booleans(),
        moe_dispatcher=st.none() | st.sampled_from(Dispatcher),
        cuda_graph=st.none() | st.sampled_from(CudaGraph),
        cuda_graph_modules=st.none() | st.lists(st.text(max_size=8), max_size=3).map(tuple),
        hierarchical_cp_sizes=st.none() | st.lists(st.integers(1, 64), max_size=3).map(tuple),
    )


@dataclass(frozen=True)
class Sample:
    """What a segment holds, one entry a slot: token, the id it predicts, whether that is trained on."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """A whole row as plain lists."""

    tokens: list[int]
    labels: list[int]
    mask: list[int]
    positions: list[int]
    real: list[bool]
    cu_seqlens: list[int]
    cu_seqlens_padded: list[int]

    @property
    def segment_of(self) -> list[int]:
        """The number of the physical segment that each slot lies in."""
        lengths = [b - a for a, b in zip(self.cu_seqlens_padded, self.cu_seqlens_padded[1:], strict=False)]
        return [segment for segment, length in enumerate(lengths) for _ in range(length)]


@dataclass(frozen=True)
class RowCase:
    """One row, what it was made of, and the stream it belongs to."""

    layout: ParallelLayout
    contract: ResolvedContract
    samples: tuple[Sample, ...]
    own_labels: bool
    slots: Slots
    row: Row

    def as_filler(self) -> RowCase:
        """The same row with nothing to train on."""
        width = len(self.slots.tokens)
        slots = replace(self.slots, labels=[self.contract.ignore_index] * width, mask=[0] * width)
        return replace(self, slots=slots, row=self.row.as_filler())


def lay_out(samples: Sequence[Sample], contract: ResolvedContract) -> Slots:
    """Each sample behind the other, padded to ``segment_multiple``; then the tail of the row."""
    tokens: list[int] = []
    labels: list[int] = []
    mask: list[int] = []
    positions: list[int] = []
    real: list[bool] = []

    def pad(count: int, first_position: int) -> None:
        tokens.extend([contract.pad_id] * count)
        labels.extend([contract.ignore_index] * count)
        mask.extend([0] * count)
        positions.extend(range(first_position, first_position + count))
        real.extend([False] * count)

    physical = [0]
    for sample in samples:
        length = len(sample.tokens)
        tokens += sample.tokens
        labels += sample.targets
        mask += sample.mask
        positions += range(length)
        real += [True] * length
        pad(-length % contract.segment_multiple, length)
        physical.append(len(tokens))
    logical = list(accumulate((len(sample.tokens) for sample in samples), initial=0))
    width = contract.seq_length if contract.pad_to_max_length else len(tokens) + -len(tokens) % contract.row_multiple
    tail = width - len(tokens)
    if tail and contract.tail_padding is TailPadding.OWN_SEGMENT:
        pad(tail, 0)
        logical.append(logical[-1])
        physical.append(width)
    elif tail:
        pad(tail, physical[-1] - physical[-2])
        physical[-1] = width
    return Slots(tokens, labels, mask, positions, real, logical, physical)


def row_of(
    slots: Slots, samples: Sequence[Sample], *, own_labels: bool, keys: tuple[SampleKey, ...] = (), rubbish: int = 7
) -> Row:
    """The row as a server holds it. Labels on padding are ``rubbish``: nobody may rely on them."""
    labels = None
    if own_labels:
        given = [label if is_real else rubbish for label, is_real in zip(slots.labels, slots.real, strict=True)]
        labels = np.array(given, np.uint32)
    return Row(
        tokens=np.array(slots.tokens, np.uint32),
        last_targets=np.array([sample.targets[-1] for sample in samples], np.uint32),
        partial_loss_mask=np.array(slots.mask, np.uint8),
        cu_seqlens=np.array(slots.cu_seqlens, np.int32),
        cu_seqlens_padded=np.array(slots.cu_seqlens_padded, np.int32),
        labels=labels,
        keys=keys,
    )


def _random_sample(source: random.Random, slots: int, vocab_size: int, *, own_labels: bool) -> Sample:
    ids = [source.randrange(vocab_size) for _ in range(slots + 1)]
    targets = [source.randrange(vocab_size) for _ in range(slots)] if own_labels else ids[1:]
    supervised = source.choice((0.0, 0.5, 1.0))
    return Sample(tuple(ids[:-1]), tuple(targets), tuple(int(source.random() < supervised) for _ in range(slots)))


@cache
def _streams(context: tuple[int, ...]) -> list[tuple[ParallelLayout, ResolvedContract]]:
    """Every combination of what a row depends on, the simplest first. One draw from a list is fast."""
    found = []
    for cp, partition, pad, tail, multiples, pack_multiple, vocab_size in product(
        context,
        (Partition.WHOLE, Partition.CONTIGUOUS, Partition.ZIGZAG),
        (False, True),
        TailPadding,
        ((1, 2), (3, 3), (1, 7)),
        (1, 3, 8),
        (50, 65_536, 65_537),
    ):
        layout = ParallelLayout(data=2, context=cp)
        segment_multiple = unit_of(partition, cp) * multiples[0]
        declared = BatchContract(
            partition=partition,
            segment_multiple=segment_multiple,
            pack_multiple=pack_multiple,
            pad_to_max_length=pad,
            tail_padding=tail,
            pad_id=0 if pad else vocab_size - 1,
            ignore_index=-1 if tail is TailPadding.EXTEND_LAST else -100,
            padding_mask=pack_multiple > 1,
        )
        seq_length = math.lcm(segment_multiple, pack_multiple) * multiples[1]
        found.append(
            (layout, resolve(declared, layout, seq_length=seq_length, global_batch_size=6, vocab_size=vocab_size))
        )
    return found


@st.composite
def row_cases(draw: st.DrawFn, context: tuple[int, ...] = (1, 2, 4)) -> RowCase:
    """Rows of one to many samples, under any partition, alignment, tail and width of ids."""
    layout, contract = draw(st.sampled_from(_streams(context)))
    source = random.Random(draw(st.integers(0, 1 << 32)))
    own_labels = draw(st.booleans())
    samples: list[Sample] = []
    room = contract.seq_length
    for wish in draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)):
        slots = min(wish, room)
        if slots == 0:
            break
        samples.append(_random_sample(source, slots, contract.vocab_size, own_labels=own_labels))
        room -= slots + -slots % contract.segment_multiple
    keys = tuple(("books", f"shard-{i}.tar", f"déjà/{i}") for i in range(len(samples)))
    laid_out = lay_out(samples, contract)
    rubbish = source.choice((0, 7, 1 << 31))
    row = row_of(laid_out, samples, own_labels=own_labels, keys=keys, rubbish=rubbish)
    return RowCase(layout, contract, tuple(samples), own_labels, laid_out, row)


def body_and_payload(
    case: RowCase, context_rank: int, *, step: int = 3, index: int = 0, with_keys: bool = False
) -> tuple[BatchBody, bytearray]:
    """What a server says of one rank's view of the row."""
    row = case.row
    view = view_arrays(row, case.contract, case.layout, context_rank, with_keys=with_keys)
    body = BatchBody(
        step=step,
        index=index,
        num_tokens=row.num_tokens,
        num_loss_tokens=row.num_loss_tokens,
        step_tokens=STEP_TOKENS,
        step_loss_tokens=STEP_LOSS_TOKENS,
        max_seqlen=int(np.diff(row.cu_seqlens_padded).max()),
        slots=view.slots,
        local_loss_tokens=view.loss_tokens,
        filler=row.filler,
        row_digest=row.digest(step, index),
        arrays=view.table,
    )
    return body, view.payload


def deliver(
    case: RowCase, context_rank: int = 0, *, step: int = 3, index: int = 0, with_keys: bool = False
) -> MicroBatch:
    """The row as one context-parallel rank gets it, through the bytes of the wire."""
    body, payload = body_and_payload(case, context_rank, step=step, index=index, with_keys=with_keys)
    sent = encode(Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=body))
    message, extra = decode([sent, payload])
    assert isinstance(message, Batch)
    return Rebuilder(case.contract, case.layout, context_rank).rebuild(message.body, memoryview(extra[0]))
