"""What the server may hold in memory at most, part by part, before a byte is read.

It counts the server and its loader processes. Where the data decides, it assumes: samples of 64 slots in the mean or
longer, none longer than a block, and ids that are stored in two bytes or more. The constants are measured
(``tests/benchmarks/memory.py`` compares the bound with the real thing) and rounded up.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nlargest
from pathlib import Path

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.errors import ConfigError, SourceError
from packhorse.rounding import ceil_div
from packhorse.wire.messages import DEFAULT_WINDOW
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.framing import ViewKey, view_key
from packhorse_service.packing.packer import DEFAULT_LOOKAHEAD
from packhorse_service.protocol.derived import slot_bytes
from packhorse_service.protocol.stream_spec import readers_of
from packhorse_service.sources.shards import expand_shards
from packhorse_service.text.formatting import human_bytes

__all__ = ["Component", "MemoryBound", "local_sizes", "refuse_over_limit", "server_memory", "stream_memory"]

ShardSizes = Mapping[str, Sequence[int]]  # bytes of each shard, by the name of its source

KIB, MIB = 1 << 10, 1 << 20

PROGRAM_BYTES = 80 * MIB  # the interpreter, numpy, ZeroMQ and what else is imported: 65 MiB
LOADER_BYTES = 64 * MIB  # of a loader process, before it loads: 59 MiB
TRACKER_BYTES = 16 * MIB  # the helper that Python starts beside loader processes
TOKENIZER_BYTES = 48 * MIB  # what tokenizers keeps of texts that it has seen, and its threads
TOKENIZER_GROWTH = 24  # a tokenizer in memory, over its file
CONNECTION_BYTES = 64 * KIB  # of a reader: 35 KiB in libzmq, and its state
COPIED_BYTES = 64 * KIB  # a larger payload is sent from where it lies
HEADER_BYTES = 2 * KIB
MEAN_SLOTS = 64  # of a sample, at least
SAMPLE_BYTES = 512  # of Python's objects for one that waits
ORIGIN_BYTES = 256  # for one in a step that is held
ID_BYTES = 4 + 1  # an id and its mask, as loaded and as built
ROW_BYTES = ID_BYTES + 1  # a slot of a row, and whether it is real
MAKING_BYTES = 8  # a slot while its row is being built
OFFSET_BYTES = 2 * 4  # of a segment: logical and physical
BLOCKS_PER_SHARD = 3  # drawn from, behind it, and one whose last samples wait
BLOCK_GROWTH = 2  # ids of two bytes become four
LOADING_BLOCKS = 4  # a block as it is read, its samples, the block of ids, and on its way
MEMBER_BYTES = KIB  # the least that a sample takes in a tar
KEY_BYTES = 128  # of each sample of an open shard


class Component(StrEnum):
    """Holder of memory in a server; the value is its name in reports."""

    PROGRAM = "program"
    STEPS = "steps_ahead"
    MAKING = "step_in_the_making"
    DELIVERY = "delivery"
    CONNECTIONS = "connections"
    LOOKAHEAD = "lookahead"
    WINDOW = "window"
    BLOCKS = "blocks"
    KEYS = "keys_of_open_shards"
    LOADERS = "loaders"
    TOKENIZER = "tokenizer"


REMEDIES = {
    Component.STEPS: "steps_ahead or contract.global_batch_size",
    Component.MAKING: "contract.global_batch_size",
    Component.LOOKAHEAD: "packing.lookahead",
    Component.WINDOW: "packing.window",
    Component.BLOCKS: "loading.block_bytes or open_shards",
    Component.KEYS: "open_shards, or write smaller shards",
    Component.LOADERS: "loading.workers or loading.block_bytes",
    Component.TOKENIZER: "loading.workers",
}


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Bytes that a server may hold at most, by what holds them."""

    parts: Mapping[Component, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def server_memory(streams: Iterable[MemoryBound]) -> MemoryBound:
    """Return the bound of a server with these streams."""
    parts = Counter[Component]({Component.PROGRAM: PROGRAM_BYTES})
    for stream in streams:
        parts.update(stream.parts)
    return MemoryBound({part: parts[part] for part in Component if parts[part]})


def refuse_over_limit(config: ServeConfig, bound: MemoryBound) -> None:
    """Raise ``ConfigError`` over the configured limit, with the parts, largest first, and what to lower."""
    limit = config.memory_limit
    if limit is None or bound.total <= limit:
        return
    lines = [
        f"  {part.replace('_', ' ')} {human_bytes(size)}" + (f": lower {REMEDIES[part]}" if part in REMEDIES else "")
        for part, size in Counter(bound.parts).most_common()
    ]
    raise ConfigError(
        f"memory_limit={human_bytes(limit)} must be at least {human_bytes(bound.total)}, which the server may come "
        "to hold; raise it, or:\n" + "\n".join(lines)
    )


# One stream ------------------------------------------------------------------------------------------------


def stream_memory(
    config: ServeConfig, base: Path, contract: ResolvedContract, layout: ParallelLayout, sizes: ShardSizes
) -> MemoryBound:
    """Return what one stream adds; ``config`` is that stream's, with paths relative to ``base``."""
    step = _Step.of(contract, layout)
    lookahead = (config.packing.lookahead or min(DEFAULT_LOOKAHEAD, contract.global_batch_size)) + 1
    readers, window = len(readers_of(layout, contract.readers)), config.packing.window
    block = config.loading.block_bytes
    open_shards = sum(source.open_shards for source in config.sources.values())
    parts: dict[Component, int] = {
        Component.STEPS: (config.steps_ahead + 1) * step.held(with_keys=config.keys),
        Component.MAKING: step.slots * MAKING_BYTES + step.samples * SAMPLE_BYTES,
        Component.DELIVERY: readers * DEFAULT_WINDOW * (min(max(step.payloads), COPIED_BYTES) + HEADER_BYTES),
        Component.CONNECTIONS: readers * CONNECTION_BYTES,
        Component.LOOKAHEAD: _waiting(lookahead * contract.seq_length),
        Component.WINDOW: window * _waiting(step.slots) if window > 1 else 0,
        Component.BLOCKS: open_shards * BLOCKS_PER_SHARD * BLOCK_GROWTH * block,
        Component.KEYS: _keys_of_open_shards(config, sizes),
        Component.LOADERS: _loaders(config),
        Component.TOKENIZER: _tokenizers(config, base),
    }
    return MemoryBound(parts)


def _waiting(slots: int) -> int:
    """Return the bytes of samples of so many slots that are not in a row yet."""
    return slots * ID_BYTES + slots // MEAN_SLOTS * SAMPLE_BYTES


def _loaders(config: ServeConfig) -> int:
    workers, loading = config.loading.workers, LOADING_BLOCKS * config.loading.block_bytes
    return workers * (LOADER_BYTES + loading) + TRACKER_BYTES if workers else loading


def _tokenizers(config: ServeConfig, base: Path) -> int:
    if config.tokenizer is None:
        return 0
    file = base / config.tokenizer.file
    size = file.stat().st_size if file.exists() else 0
    return (1 + config.loading.workers) * (TOKENIZER_BYTES + TOKENIZER_GROWTH * size)


def _keys_of_open_shards(config: ServeConfig, sizes: ShardSizes) -> int:
    """Return the bytes of the keys of open shards, which are kept to find one that is given twice."""
    largest = (nlargest(source.open_shards, sizes.get(name, ())) for name, source in config.sources.items())
    return sum(map(sum, largest)) // MEMBER_BYTES * KEY_BYTES


def local_sizes(config: ServeConfig, base: Path) -> ShardSizes:
    """Return the sizes of the shards that can be listed without a network; what cannot be found is left out."""
    found: dict[str, list[int]] = {}
    for name, source in config.sources.items():
        with contextlib.suppress(SourceError):  # it is `serve` that refuses them
            local = [pattern for pattern in source.shards if "://" not in pattern]
            found[name] = [shard.size for shard in expand_shards(local, base)] if local else []
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """Size of one step as it is held."""

    rows: int
    width: int  # slots of a row
    samples_of_row: int
    payloads: Sequence[int]  # bytes of each view of a row

    @classmethod
    def of(cls, contract: ResolvedContract, layout: ParallelLayout) -> _Step:
        width = contract.max_width * (1 if contract.packed else contract.micro_batch_size)
        samples = min(contract.max_segments or width, ceil_div(width, MEAN_SLOTS))
        views = {view_key(reader, contract, layout) for reader in readers_of(layout) if reader.data == 0}
        payloads = [_payload(view, width, contract, layout) for view in views]
        return cls(contract.num_microbatches(layout) * layout.data, width, samples, payloads)

    @property
    def slots(self) -> int:
        return self.rows * self.width

    @property
    def samples(self) -> int:
        return self.rows * self.samples_of_row

    def held(self, *, with_keys: bool) -> int:
        """Return the bytes of its views, and of the rows that they were made from."""
        copies = 1 + len(self.payloads)
        of_sample = ORIGIN_BYTES + copies * OFFSET_BYTES + (copies * KEY_BYTES if with_keys else 0)
        return self.rows * sum(self.payloads) + self.slots * ROW_BYTES + self.samples * of_sample


def _payload(view: ViewKey, width: int, contract: ResolvedContract, layout: ParallelLayout) -> int:
    """Return the bytes of a view of a row of ``width`` slots, without its offsets."""
    whole = contract.partition is Partition.WHOLE or layout.context == 1
    slots = width if whole else width // layout.context
    return round(slots * slot_bytes(view.needs, contract, layout))
