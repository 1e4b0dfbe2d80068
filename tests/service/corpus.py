"""Corpora for the tests of the pure stages: in memory, or as shards written and read without the code under test."""

from __future__ import annotations

import io
import random
import tarfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import ResolvedContract
from packhorse.errors import SourceError
from packhorse.rows.row import Row, SampleKey
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.framing import FramedStep, ViewKey
from packhorse_service.loading.block import BlockRequest, Fault, TokenBlock
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.engine import BlockStore, Engine, InlineEngine, Load
from packhorse_service.mixing.open_blocks import SourcePlan
from packhorse_service.mixing.order import Mixing, SourceOrderPlan
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.mixing.unsupervised import Unsupervised
from packhorse_service.packing.modes import PackedMicroBatch, Segment
from packhorse_service.pipeline.plan import StreamPlan, plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.planning.rows import build_rows
from packhorse_service.sources.shards import Shard

VOCABULARY = 60_000
BLOCK_STRIDE = 1000  # bytes that a block held in memory is said to have

Pair = tuple[int, int]  # an input id and its target
Samples = Sequence[Sequence[int]]


# In memory -------------------------------------------------------------------------------------------


def make_block(
    samples: Samples,
    *,
    keys: Sequence[str] | None = None,
    next_offset: int | None = None,
    labels: Samples | None = None,
    loss_mask: Samples | None = None,
    faulty: Mapping[int, str] | None = None,
) -> TokenBlock:
    """A block of ``samples``, given by their ids; ``faulty`` gives the reasons by index."""
    return TokenBlock(
        tokens=np.array([token for ids in samples for token in ids], np.uint32),
        offsets=np.cumsum([0, *map(len, samples)]).astype(np.int64),
        loss_mask=None if loss_mask is None else np.array([bit for mask in loss_mask for bit in mask], np.uint8),
        labels=None if labels is None else np.array([label for row in labels for label in row], np.uint32),
        keys=tuple(str(i) for i in range(len(samples))) if keys is None else tuple(keys),
        next_offset=next_offset,
        faults=tuple(Fault(i, f"sample {i}", reason) for i, reason in (faulty or {}).items()),
    )


def consecutive(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Samples of these lengths, whose ids count on from one to the next: no id comes twice."""
    ends = accumulate(lengths, initial=first)
    return [list(range(begin, end)) for begin, end in pairwise(ends)]


class MemoryCorpus:
    """Sources held in memory, with the ``load`` of an engine. ``loads`` lists what was asked for."""

    def __init__(self) -> None:
        self.loads: list[BlockRequest] = []
        self.settings: list[SourcePlan] = []
        self._blocks: dict[BlockRequest, TokenBlock] = {}

    def add(
        self,
        shards: Sequence[Sequence[TokenBlock]],
        *,
        name: str = "docs",
        weight: int = 1,
        epochs: int | None = 1,
        open_shards: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        over_length: OverLength = OverLength.ERROR,
        skip_budget: int = 0,
        unsupervised: Unsupervised = Unsupervised.KEEP,
    ) -> SourcePlan:
        """Add a source. Where a block's next one begins is set here; blocks need not say it."""
        named = tuple(
            Shard(f"{name}-{i}.tar", f"/memory/{name}-{i}.tar", BLOCK_STRIDE * 64) for i in range(len(shards))
        )
        for shard, blocks in zip(named, shards, strict=True):
            first = 0
            for number, block in enumerate(blocks):
                after = None if number + 1 == len(blocks) else (number + 1) * BLOCK_STRIDE
                placed = TokenBlock(
                    block.tokens, block.offsets, block.loss_mask, block.labels, block.keys, after, block.faults
                )
                self._blocks[BlockRequest(name, shard, number * BLOCK_STRIDE, first)] = placed
                first += block.count
        order = SourceOrderPlan(
            name=name,
            shards=len(shards),
            weight=weight,
            epochs=epochs,
            open_shards=open_shards,
            shuffle=shuffle,
            seed=seed,
        )
        setting = SourcePlan(
            order=order, shards=named, over_length=over_length, skip_budget=skip_budget, unsupervised=unsupervised
        )
        self.settings.append(setting)
        return setting

    def load(self, request: BlockRequest) -> TokenBlock:
        self.loads.append(request)
        if request not in self._blocks:
            raise SourceError(f"shard {request.shard.name!r}: there is no block at {request.offset}")
        return self._blocks[request]

    def stream(
        self, seq_length: int | None = 64, engine: Engine | None = None, mixing: Mixing | None = None
    ) -> SampleStream:
        blocks = BlockStore(engine or InlineEngine(self.load))
        return SampleStream(self.settings, blocks, seq_length, mixing or Mixing())


# On disk ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One sample as an independent reader finds it in a shard."""

    shard: str
    key: str
    ids: list[int]
    loss_mask: list[int] | None
    labels: list[int] | None

    def pairs(self) -> list[Pair]:
        """Every (input, target) that the sample holds."""
        return list(pairwise(self.ids) if self.labels is None else zip(self.ids, self.labels, strict=True))


def write_shard(
    path: Path,
    samples: Mapping[str, Sequence[int]],
    *,
    loss_masks: Mapping[str, Sequence[int]] | None = None,
    labels: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Write samples, by key, as a tar of ``.npy`` members. The same samples give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, ids in samples.items():
            members = {f"{key}.npy": np.array(ids, "<u2")}
            if loss_masks is not None:
                members[f"{key}.loss_mask.npy"] = np.array(loss_masks[key], "|u1")
            if labels is not None:
                members[f"{key}.labels.npy"] = np.array(labels[key], "<i4")
            for name, array in members.items():
                stream = io.BytesIO()
                np.save(stream, array)
                header = tarfile.TarInfo(name)
                header.size = stream.tell()
                stream.seek(0)
                tar.addfile(header, stream)
    return path


def write_source(folder: Path, lengths: Sequence[Sequence[int]], *, first: int = 1, masked: bool = False) -> list[Path]:
    """Write a shard of samples for each list of lengths. No id comes twice; ``masked`` adds prompts."""
    paths = []
    for number, of_shard in enumerate(lengths):
        samples = {f"{i:04d}": ids for i, ids in enumerate(consecutive(of_shard, first))}
        first += sum(of_shard)
        masks = {key: [int(i >= len(ids) // 3) for i in range(len(ids))] for key, ids in samples.items()}
        path = folder / f"part-{number:03d}.tar"
        paths.append(write_shard(path, samples, loss_masks=masks if masked else None))
    return paths


def random_lengths(seed: int, shards: int, samples: int, *, longest: int, shortest: int = 2) -> list[list[int]]:
    """Skewed lengths in ids, as real data has them, within ``shortest`` … ``longest``."""
    drawn = np.random.default_rng(seed).lognormal(np.log(longest / 6), 0.9, (shards, samples))
    clipped: list[list[int]] = np.clip(drawn.astype(int), shortest, longest).tolist()
    return clipped


def read_shards(paths: Sequence[Path]) -> list[Stored]:
    """Read shards with ``tarfile`` and numpy alone."""
    return [sample for path in paths for sample in _read_shard(path)]


def _read_shard(path: Path) -> Iterator[Stored]:
    arrays: dict[str, dict[str, list[int]]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            stream = tar.extractfile(member)
            assert stream is not None
            arrays.setdefault(key, {})[extension] = np.load(io.BytesIO(stream.read()), allow_pickle=False).tolist()
    for key, found in arrays.items():
        yield Stored(path.name, key, found["npy"], found.get("loss_mask.npy"), found.get("labels.npy"))


# The whole path --------------------------------------------------------------------------------------


def make_config(sources: Mapping[str, Mapping[str, object]], **sections: object) -> ServeConfig:
    """A configuration with small rows; ``contract`` adds to the contract's defaults here."""
    contract = {"seq_length": 64, "global_batch_size": 4, "vocab_size": VOCABULARY}
    given = sections.pop("contract", {})
    assert isinstance(given, dict)
    loading = {"workers": 0, "block_bytes": 4096}
    return ServeConfig.model_validate(
        {"sources": sources, "contract": contract | given, "loading": loading, **sections}
    )


def make_plan(base: Path, sources: Mapping[str, Mapping[str, object]], **sections: object) -> StreamPlan:
    return plan_stream(make_config(sources, **sections), base)


def inline_engine(plan: StreamPlan) -> InlineEngine:
    """An engine that reads again at once where reading failed."""
    return InlineEngine(BlockLoader(plan.decoding, sleep=lambda _seconds: None).load)


def run_plan(plan: StreamPlan, snapshot: bytes | None = None, *, limit: int = 10_000) -> list[FramedStep]:
    """All steps of a plan, at most ``limit``, from the beginning or from a snapshot."""
    pipeline = Pipeline(plan, inline_engine(plan))
    if snapshot is not None:
        pipeline.restore(snapshot)
    return steps_of(pipeline, limit=limit)


def steps_of(pipeline: Pipeline, *, limit: int = 10_000) -> list[FramedStep]:
    steps: list[FramedStep] = []
    while len(steps) < limit and (step := pipeline.next_step()) is not None:
        steps.append(step)
    return steps


def microbatches(step: FramedStep, plan: StreamPlan) -> list[MicroBatch]:
    """The micro-batches of the whole rows of a step, rank by rank, as a client rebuilds them."""
    return [
        Rebuilder(plan.contract, plan.layout, 0).rebuild(view.body, memoryview(view.payload))
        for rank in range(plan.layout.data)
        for view in step.views_of(ViewKey(rank, 0))
    ]


def segments_of(batch: MicroBatch) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(tokens, labels) of each segment that holds something, cut by the offsets."""
    found = []
    lengths = np.diff(batch.cu_seqlens)
    for start, length in zip(batch.cu_seqlens_padded.tolist(), lengths.tolist(), strict=False):
        if length:
            found.append((batch.tokens[start : start + length], batch.labels[start : start + length]))
    return found


def pairs_of(batch: MicroBatch) -> list[Pair]:
    """Every (input, target) that a micro-batch delivers; none where it is a filler."""
    if batch.filler:
        return []
    return [
        pair for tokens, labels in segments_of(batch) for pair in zip(tokens.tolist(), labels.tolist(), strict=True)
    ]


def delivered_pairs(steps: Sequence[FramedStep], plan: StreamPlan) -> Counter[Pair]:
    """How often each (input, target) pair is delivered, over all ranks and steps."""
    return Counter(pair for step in steps for batch in microbatches(step, plan) for pair in pairs_of(batch))


def stored_pairs(paths: Sequence[Path]) -> Counter[Pair]:
    return Counter(pair for sample in read_shards(paths) for pair in sample.pairs())


@dataclass(frozen=True)
class Corpus:
    """Three sources on disk: plain, with prompts, and with labels of its own. No id comes twice."""

    base: Path
    shards: Mapping[str, Sequence[Path]]

    @classmethod
    def written(cls, base: Path) -> Self:
        """Write it. No sample is longer than 64 slots."""
        docs = write_source(base / "docs", random_lengths(1, 4, 16, longest=65))
        chat = write_source(base / "chat", random_lengths(2, 3, 12, longest=60), first=20_000, masked=True)
        own = []
        for number in range(2):
            lengths = random_lengths(3 + number, 1, 10, longest=50)[0]
            samples = {f"s{i}": ids for i, ids in enumerate(consecutive(lengths, 40_000 + 2000 * number))}
            labels = {key: [id_ + 5000 if id_ % 7 else -100 for id_ in ids] for key, ids in samples.items()}
            own.append(write_shard(base / "own" / f"part-{number}.tar", samples, labels=labels))
        return cls(base, {"docs": docs, "chat": chat, "own": own})

    @property
    def every_shard(self) -> list[Path]:
        return [path for paths in self.shards.values() for path in paths]

    def plan(self, *, of_each: Mapping[str, object] | None = None, **sections: Any) -> StreamPlan:
        """A plan of all three sources; ``of_each`` goes to each of them."""
        weights = {"docs": 0.5, "chat": 0.3, "own": 0.2}
        sources = {
            name: {"shards": f"{name}/part-*.tar", "weight": weight} | dict(of_each or {})
            for name, weight in weights.items()
        }
        return make_plan(self.base, sources, **sections)


def over_long_source(base: Path, longest: int = 400) -> dict[str, dict[str, object]]:
    """A source of one folder with samples of up to six rows."""
    write_source(base / "long", random_lengths(5, 3, 12, longest=longest))
    return {"long": {"shards": "long/part-*.tar", "over_length": "split"}}


def row_contents(batch: MicroBatch) -> tuple[bytes, ...]:
    """A row wherever it is dealt to: all of it but its position."""
    arrays = (
        batch.tokens,
        batch.labels,
        batch.loss_mask,
        batch.position_ids,
        batch.cu_seqlens,
        batch.cu_seqlens_padded,
    )
    return tuple(array.tobytes() for array in arrays)


def rows_by_step(steps: Sequence[FramedStep], plan: StreamPlan) -> list[Counter[tuple[bytes, ...]]]:
    """What rows each step holds, wherever they are dealt to."""
    return [Counter(map(row_contents, microbatches(step, plan))) for step in steps]


def damage(path: Path, member: str) -> Path:
    """Overwrite the content of one member of a shard in place."""
    with tarfile.open(path) as tar:
        info = tar.getmember(member)
    with path.open("r+b") as file:
        file.seek(info.offset_data, io.SEEK_SET)
        file.write(b"x" * info.size)
    return path


# Loading in other processes --------------------------------------------------------------------------


def make_slow_load(specs: Mapping[str, DecodingSpec], seed: int) -> Load:
    """A loader that spends a while on some blocks, so that they arrive in another order."""
    loader = BlockLoader(specs)

    def load(request: BlockRequest) -> TokenBlock:
        spins = random.Random(f"{seed} {request.shard.name} {request.offset}").randrange(60_000)
        deque(range(spins), maxlen=0)
        return loader.load(request)

    return load


# Hostile bytes ---------------------------------------------------------------------------------------


def mutated(data: bytes, source: random.Random) -> bytes:
    """One to three bytes changed, dropped or put in."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(changed))
        match source.randrange(4):
            case 0:
                del changed[at]
            case 1:
                changed.insert(at, source.randrange(256))
            case _:
                changed[at] = source.choice([0, 1, 127, 128, 255, source.randrange(256)])
    return bytes(changed)


# A row -----------------------------------------------------------------------------------------------


def build_row(segments: Sequence[Segment], contract: ResolvedContract, keys: tuple[SampleKey, ...] = ()) -> Row:
    """One row of a micro-batch's segments."""
    return build_rows([PackedMicroBatch.of(segments)], contract, [keys])[0]
