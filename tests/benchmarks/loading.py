"""What loading pre-tokenised shards costs: ours beside a plain ``tarfile`` loop and a bare walk over the headers.

    python -m tests.benchmarks.loading

CPU seconds of all processes, system time included, for a million tokens; the best of several runs, taken in
turns. The limit walks and copies only: it checks nothing, knows plain files alone and makes no blocks.
"""

from __future__ import annotations

import io
import resource
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.table import Table
from webdataset import TarWriter

from packhorse_service.loading import decode
from packhorse_service.loading.block import BlockRequest
from packhorse_service.loading.decode import BlockLoader, DecodingSpec
from packhorse_service.loading.engine import BlockStore, Engine, InlineEngine, Load, ProcessEngine
from packhorse_service.sources.npy import dump_array
from tests.benchmarks.measuring import console
from tests.length_streams import log_normal
from tests.service.shards_on_disk import Files, shard_at, write_tar

SHARDS, SAMPLES_EACH = 8, 1024
VOCABULARY = {"<u2": 50_000, "<i4": 128_000}
OPEN_SHARDS = 4
REPEATS = 5
ARRAY_HEADER = 128  # bytes, as numpy.save writes it
REGULAR = ord("0")
PASSES = 6  # with processes, over and above a first one: what starting them costs is not counted

SPECS = {"ids": DecodingSpec(name="ids", vocab_size=max(VOCABULARY.values()))}

Reader = Callable[[Sequence[Path]], object]
Writer = Callable[[Path, Files], None]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Shards of samples of about 500 ids."""

    title: str
    dtype: str
    write: Writer
    masked: bool = False  # a loss mask beside the ids


# Shards ---------------------------------------------------------------------------------------------------


def write_as_webdataset(path: Path, files: Files) -> None:
    """A PAX header with the time before each member, as its writer leaves it."""
    with TarWriter(str(path)) as writer:
        for name, data in files:
            key, _, extension = name.partition(".")
            writer.write({"__key__": key, extension: data})


def write_plain(path: Path, files: Files) -> None:
    """One header for each member."""
    write_tar(path, files, tarfile.USTAR_FORMAT)


CORPORA = (
    Corpus("int32 ids, written by webdataset's TarWriter", "<i4", write_as_webdataset),
    Corpus("uint16 ids, written by webdataset's TarWriter", "<u2", write_as_webdataset),
    Corpus("int32 ids, plain headers", "<i4", write_plain),
    Corpus("int32 ids with loss masks, plain headers", "<i4", write_plain, masked=True),
)


def make_shards(corpus: Corpus, folder: Path) -> tuple[list[Path], int]:
    """Return the shards, and how many ids they hold."""
    random = np.random.default_rng(0)
    lengths = log_normal(SHARDS * SAMPLES_EACH, 8192).reshape(SHARDS, SAMPLES_EACH)
    paths = []
    for number, of_shard in enumerate(lengths.tolist()):
        files: list[tuple[str, bytes]] = []
        for sample, length in enumerate(of_shard):
            key = f"{number:03d}{sample:06d}"
            ids = random.integers(0, VOCABULARY[corpus.dtype], length).astype(corpus.dtype)
            if corpus.masked:
                files.append((f"{key}.loss_mask.npy", dump_array((ids % 2).astype(np.uint8))))
            files.append((f"{key}.npy", dump_array(ids)))
        paths.append(folder / f"ids-{number:06d}.tar")
        corpus.write(paths[-1], files)
    return paths, int(lengths.sum())


# Readers --------------------------------------------------------------------------------------------------


def walk(paths: Sequence[Path]) -> None:
    """The limit: sizes read by hand, the arrays copied one behind the other."""
    for path in paths:
        raw = path.read_bytes()
        data, target = memoryview(raw), memoryview(bytearray(len(raw)))
        place, filled = 0, 0
        while raw[place]:
            size = int(raw[place + 124 : place + 135], 8)
            if raw[place + 156] == REGULAR:
                values = data[place + 512 + ARRAY_HEADER : place + 512 + size]
                target[filled : filled + len(values)] = values
                filled += len(values)
            place += 512 + -(-size // 512) * 512


def with_tarfile(paths: Sequence[Path]) -> None:
    """As it is written by hand: ``tarfile``, ``numpy.load``, the arrays of a shard joined."""
    for path in paths:
        with tarfile.open(path) as tar:
            contents = [tar.extractfile(member) for member in tar]
            np.concatenate([np.load(io.BytesIO(content.read())) for content in contents if content is not None])


def inline(paths: Sequence[Path]) -> None:
    """Ours, in one process."""
    load_all(InlineEngine(make_load()), paths)


def by_sample(paths: Sequence[Path]) -> None:
    """Ours, where no block is loaded as columns."""
    with patch.object(decode, "read_columnar", return_value=None):
        inline(paths)


def make_load() -> Load:
    return BlockLoader(SPECS).load


def load_all(engine: Engine, paths: Sequence[Path]) -> None:
    """All blocks of all shards, a few shards at a time, the next block of each asked for ahead."""
    store = BlockStore(engine)
    waiting = [BlockRequest("ids", shard_at(path), 0, 0) for path in paths]
    reading = deque[BlockRequest]()
    while waiting or reading:
        while waiting and len(reading) < OPEN_SHARDS:
            reading.append(waiting.pop())
        store.prefetch(reading)
        request = reading.popleft()
        block = store.get(request)
        if block.next_offset is not None:
            reading.append(BlockRequest("ids", request.shard, block.next_offset, request.first_sample + block.count))


def in_processes(workers: int, paths: Sequence[Path], passes: int) -> None:
    engine = ProcessEngine(workers, make_load)
    for _ in range(passes):
        load_all(engine, paths)
    engine.close()


# Measuring ------------------------------------------------------------------------------------------------


def cpu_seconds(run: Callable[[], object]) -> float:
    """Of this process and of those it starts and ends within ``run``."""

    def used() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start = used()
    run()
    return used() - start


def costs_in_turns(readers: Sequence[Reader], paths: Sequence[Path]) -> list[float]:
    """CPU seconds of each reader: the best of several runs."""
    rounds = [[cpu_seconds(partial(reader, paths)) for reader in readers] for _ in range(REPEATS)]
    return [min(of_reader) for of_reader in zip(*rounds, strict=True)]


def cost_in_processes(workers: int, paths: Sequence[Path]) -> float:
    """CPU seconds of a pass over the shards, start and end of the processes left out."""
    once = cpu_seconds(partial(in_processes, workers, paths, 1))
    return (cpu_seconds(partial(in_processes, workers, paths, 1 + PASSES)) - once) / PASSES


READERS: dict[str, Reader] = {
    "limit: bare walk, one copy": walk,
    "ours": inline,
    "ours, where samples differ": by_sample,
    "plain tarfile loop": with_tarfile,
}


def table_of(corpus: Corpus, folder: Path, processes: Sequence[int]) -> Table:
    """What a million tokens of one corpus cost."""
    paths, tokens = make_shards(corpus, folder)
    found = dict(zip(READERS, costs_in_turns(list(READERS.values()), paths), strict=True))
    for workers in processes:
        found[f"ours, {workers} processes"] = cost_in_processes(workers, paths)
    limit = next(iter(found.values()))
    samples = SHARDS * SAMPLES_EACH
    table = Table(
        corpus.title, "CPU-s / M tokens", "µs / sample", "x limit", title=f"{samples:,} samples, {tokens:,} ids"
    )
    for name, seconds in found.items():
        table.add_row(name, f"{1e6 * seconds / tokens:.4f}", f"{1e6 * seconds / samples:.2f}", f"{seconds / limit:.1f}")
    return table


def tables(*, quick: bool = False) -> Iterator[Table]:
    """One for each corpus; the first alone where ``quick``."""
    for number, corpus in enumerate(CORPORA[:1] if quick else CORPORA):
        with tempfile.TemporaryDirectory() as folder:
            yield table_of(corpus, Path(folder), (1, 2) if number < 2 else ())


def main() -> None:
    screen = console()
    for table in tables():
        screen.print(table)


if __name__ == "__main__":
    main()
