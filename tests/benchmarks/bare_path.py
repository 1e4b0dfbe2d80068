"""The limit: hand-parsed tars, one copy into packs, plain ZeroMQ, and nothing else.

No labels, mask, positions or alignment, no balance, no acknowledgement beyond a credit, no resuming, no checks: what
a feed over a socket cannot take less than.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from tests.benchmarks.consuming import Tally, consume

__all__: list[str] = []

BLOCK = 512  # of a tar
ITEM = 4  # bytes of an id
CREDIT = 16  # packs under way to a reader
NPY_PREFIX = 10  # magic, version, length of the header


class Pack(NamedTuple):
    ids: bytearray  # int32 [capacity]
    offsets: list[int]  # of its segments


def read_packs(paths: Sequence[Path], capacity: int) -> Iterator[Pack]:
    """Samples in their order; each goes into the pack being filled, or begins the next."""
    ids, offsets, used = bytearray(capacity * ITEM), [0], 0
    room = capacity * ITEM
    for path in paths:
        for data, begin, end in _samples(path):
            size = end - begin
            if used + size > room:
                yield Pack(ids, offsets)
                ids, offsets, used = bytearray(room), [0], 0
            ids[used : used + size] = data[begin:end]
            used += size
            offsets.append(used // ITEM)
    yield Pack(ids, offsets)


def _samples(path: Path) -> Iterator[tuple[memoryview, int, int]]:
    """Where the ids of each sample lie, without the last, which is only a target."""
    content = path.read_bytes()
    data, at = memoryview(content), 0
    while content[at]:
        size = int(content[at + 124 : at + 135], 8)
        at += BLOCK
        header = content[at + 8] | content[at + 9] << 8
        yield data, at + NPY_PREFIX + header, at + size - ITEM
        at += -(-size // BLOCK) * BLOCK


def send_packs(endpoint: str, paths: Sequence[Path], capacity: int, data: int, tensor: int) -> None:
    """Deal packs to ``data`` ranks in turn, each to its ``tensor`` readers; empty ones end it."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind(endpoint)
    readers = [bytes([1, rank]) for rank in range(data * tensor)]
    credits, staying = dict.fromkeys(readers, 0), set(readers)

    def hear() -> None:
        peer, more = router.recv_multipart()
        credits[peer] += more[0] if more else 0
        if not more:
            staying.remove(peer)

    def send(reader: bytes, *frames: bytes | bytearray) -> None:
        while not credits[reader] or router.poll(0):
            hear()
        credits[reader] -= 1
        router.send_multipart([reader, *frames], copy=False)

    turns = cycle(readers[rank * tensor : (rank + 1) * tensor] for rank in range(data))
    for pack, peers in zip(read_packs(paths, capacity), turns, strict=False):
        offsets = np.array(pack.offsets, np.int32).tobytes()
        for peer in peers:
            send(peer, offsets, pack.ids)
    for peer in readers:
        send(peer, b"", b"")
    while staying:  # a socket that closes with credits unread would take back what is under way
        hear()
    router.close()
    context.term()


def receive_packs(endpoint: str, rank: int) -> Iterator[Tally]:
    """One tally for each pack; every id is touched."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, bytes([1, rank]))
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(endpoint)
    dealer.send(bytes([CREDIT]))
    taken = 0
    while True:
        offsets, ids = dealer.recv_multipart(copy=False)
        if not len(offsets.buffer):
            break
        taken += 1
        if taken % (CREDIT // 2) == 0:
            dealer.send(bytes([CREDIT // 2]))
        held = np.frombuffer(offsets.buffer, np.int32)
        yield Tally(len(held) - 1, int(held[-1]), int(np.frombuffer(ids.buffer, np.int32).sum(dtype=np.int64)))
    dealer.send(b"")
    dealer.close()
    context.term()


def sender(task: dict[str, Any]) -> Iterator[Tally]:
    send_packs(task["endpoint"], [Path(path) for path in task["paths"]], task["capacity"], task["data"], task["tensor"])
    yield Tally()


def receiver(task: dict[str, Any]) -> Iterator[Tally]:
    return receive_packs(task["endpoint"], task["rank"])


ENDS: dict[str, Callable[[dict[str, Any]], Iterator[Tally]]] = {"send": sender, "receive": receiver}

if __name__ == "__main__":
    consume(ENDS[sys.argv[1]])
