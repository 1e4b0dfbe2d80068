"""The baseline: ``webdataset`` and ``torch.utils.data.DataLoader`` with packing in the collation, as people write it.

It builds the same full arrays. Each rank reads the shards of its data-parallel coordinate: tensor-parallel ranks
read and pack the same ones, each for itself. There is no shuffling, no balance and no resuming.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import webdataset
from torch.utils.data import DataLoader

from tests.benchmarks.consuming import FIELDS, Tally, consume, looked_at, tally_of

__all__: list[str] = []

LOOKAHEAD = 256  # samples that are packed together: 16 packs' worth
IGNORE_INDEX = -100

Ids = npt.NDArray[np.int32]
Batch = dict[str, torch.Tensor]


def plain_loader(paths: Sequence[Path], capacity: int, data: int, rank: int, workers: int) -> Iterable[Batch]:
    """Micro-batches of one packed row: tokens, labels, position_ids, loss_mask and both offsets."""
    dataset = webdataset.DataPipeline(
        webdataset.SimpleShardList([str(path) for path in paths[rank::data]]),
        webdataset.split_by_worker,
        webdataset.tarfile_to_samples(),
        webdataset.decode(),
        webdataset.to_tuple("npy"),
        partial(packed, capacity=capacity),
    )
    loader: Iterable[Batch] = DataLoader(dataset, batch_size=None, num_workers=workers)
    return loader


def packed(samples: Iterable[tuple[Ids]], capacity: int) -> Iterator[Batch]:
    """First-fit decreasing over one buffer of samples after the other."""
    buffer: list[Ids] = []
    for (ids,) in samples:
        buffer.append(ids)
        if len(buffer) == LOOKAHEAD:
            yield from (collate(pack, capacity) for pack in first_fit_decreasing(buffer, capacity))
            buffer = []
    yield from (collate(pack, capacity) for pack in first_fit_decreasing(buffer, capacity))


def first_fit_decreasing(samples: Iterable[Ids], capacity: int) -> list[list[Ids]]:
    packs: list[list[Ids]] = []
    rooms: list[int] = []
    for ids in sorted(samples, key=len, reverse=True):
        slots = len(ids) - 1
        for number, room in enumerate(rooms):
            if room >= slots:
                packs[number].append(ids)
                rooms[number] -= slots
                break
        else:
            packs.append([ids])
            rooms.append(capacity - slots)
    return packs


def collate(pack: Sequence[Ids], capacity: int) -> Batch:
    tokens = np.zeros(capacity, np.int64)
    labels = np.full(capacity, IGNORE_INDEX, np.int64)
    position_ids = np.zeros(capacity, np.int64)
    loss_mask = np.zeros(capacity, np.float32)
    offsets = [0]
    for ids in pack:
        begin, end = offsets[-1], offsets[-1] + len(ids) - 1
        tokens[begin:end] = ids[:-1]
        labels[begin:end] = ids[1:]
        position_ids[begin:end] = np.arange(end - begin)
        loss_mask[begin:end] = 1.0
        offsets.append(end)
    cu_seqlens: npt.NDArray[Any] = np.array(offsets, np.int32)
    cu_seqlens_padded = cu_seqlens.copy()
    if offsets[-1] < capacity:  # the padding behind the last is a segment of its own, of no tokens
        cu_seqlens = np.append(cu_seqlens, cu_seqlens[-1])
        cu_seqlens_padded = np.append(cu_seqlens_padded, np.int32(capacity))
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "position_ids": position_ids,
        "loss_mask": loss_mask,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens_padded,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def read(task: dict[str, Any]) -> Iterator[Tally]:
    paths = [Path(path) for path in task["paths"]]
    rank = task["rank"] // task["tensor"]
    for number, batch in enumerate(plain_loader(paths, task["capacity"], task["data"], rank, task["workers"])):
        looked_at(number, *(batch[name] for name in FIELDS))
        yield tally_of(batch["tokens"], batch["cu_seqlens"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    consume(read)
