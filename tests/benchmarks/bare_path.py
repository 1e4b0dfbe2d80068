"""The limit: hand-parsed tars, one copy into packs, plain ZeroMQ, and nothing else.

No labels, mask, positions or alignment, no balance, no acknowledgement beyond a credit, no resuming, no checks: what
a feed over a socket cannot take less than. With ``full``, the sender hashes each pack as a row digest does and the
receiver builds the arrays that the product delivers, plainly, with numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from tests.benchmarks.consuming import IGNORE_INDEX, Tally, consume, tally_of

__all__ = ["full_arrays", "full_header", "read_packs"]

BLOCK = 512  # of a tar
ITEM = 4  # bytes of an id
CREDIT = 16  # packs under way to a reader
NPY_PREFIX = 10  # magic, version, length of the header
DIGEST_BYTES = 16

Buffer = bytes | memoryview


class Pack(NamedTuple):
    ids: bytearray  # int32 [capacity]
    offsets: list[int]  # of its segments
    last_targets: bytearray  # int32, of each segment, where they were asked for

    @classmethod
    def empty(cls, room: int) -> Pack:
        return cls(bytearray(room), [0], bytearray())


def read_packs(paths: Sequence[Path], capacity: int, *, targets: bool = False) -> Iterator[Pack]:
    """Samples in their order; each goes into the pack being filled, or begins the next."""
    room = capacity * ITEM
    pack, used = Pack.empty(room), 0
    for path in paths:
        for data, begin, end in _samples(path):
            size = end - begin
            if used + size > room:
                yield pack
                pack, used = Pack.empty(room), 0
            pack.ids[used : used + size] = data[begin:end]
            used += size
            pack.offsets.append(used // ITEM)
            if targets:
                pack.last_targets.extend(data[end : end + ITEM])
    yield pack


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


def _header(pack: Pack) -> bytes:
    return np.array(pack.offsets, np.int32).tobytes()


def full_header(pack: Pack) -> bytes:
    """Digest, offsets and last targets."""
    offsets = _header(pack)
    digest = blake2b(memoryview(pack.ids)[: pack.offsets[-1] * ITEM], digest_size=DIGEST_BYTES)
    digest.update(offsets)
    return digest.digest() + offsets + pack.last_targets


def send_packs(
    endpoint: str, paths: Sequence[Path], capacity: int, data: int, tensor: int, *, full: bool = False
) -> None:
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
    header_of = full_header if full else _header
    for pack, peers in zip(read_packs(paths, capacity, targets=full), turns, strict=False):
        header = header_of(pack)
        for peer in peers:
            send(peer, header, pack.ids)
    for peer in readers:
        send(peer, b"", b"")
    while staying:  # a socket that closes with credits unread would take back what is under way
        hear()
    router.close()
    context.term()


def _touched(header: Buffer, ids: Buffer) -> Tally:
    """Every id, as it came."""
    offsets = np.frombuffer(header, np.int32)
    return Tally(len(offsets) - 1, int(offsets[-1]), int(np.frombuffer(ids, np.int32).sum(dtype=np.int64)))


def full_arrays(header: Buffer, ids: Buffer) -> tuple[npt.NDArray[Any], ...]:
    """What the product delivers, in the order of ``consuming.FIELDS``."""
    words = np.frombuffer(header, np.int32)[DIGEST_BYTES // ITEM :]
    offsets, last_targets = np.split(words, [len(words) // 2 + 1])
    tokens = np.frombuffer(ids, np.int32).astype(np.int64)
    width, used = len(tokens), int(offsets[-1])
    logical = physical = offsets
    if used < width:  # the padding behind the last sample is a segment, of no tokens
        logical, physical = np.append(offsets, offsets[-1]), np.append(offsets, np.int32(width))
    labels, mask = np.empty_like(tokens), np.ones(width, np.float32)
    labels[:-1] = tokens[1:]
    labels[offsets[1:] - 1] = last_targets
    labels[used:], mask[used:] = IGNORE_INDEX, 0
    positions = np.arange(width) - physical[:-1].repeat(np.diff(physical))
    return tokens, labels, positions, mask, logical, physical


def _built(header: Buffer, ids: Buffer) -> Tally:
    """The full arrays of a pack; every id is touched."""
    tokens, _, _, _, logical, _ = full_arrays(header, ids)
    return tally_of(tokens, logical)


def receive_packs(endpoint: str, rank: int, tally: Callable[[Buffer, Buffer], Tally]) -> Iterator[Tally]:
    """One tally for each pack; every id is touched."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, bytes([1, rank]))
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(endpoint)
    dealer.send(bytes([CREDIT]))
    taken = 0
    while True:
        header, ids = dealer.recv_multipart(copy=False)
        if not len(header.buffer):
            break
        taken += 1
        if taken % (CREDIT // 2) == 0:
            dealer.send(bytes([CREDIT // 2]))
        yield tally(header.buffer, ids.buffer)
    dealer.send(b"")
    dealer.close()
    context.term()


def sender(task: dict[str, Any]) -> Iterator[Tally]:
    paths, shape = [Path(path) for path in task["paths"]], (task["capacity"], task["data"], task["tensor"])
    send_packs(task["endpoint"], paths, *shape, full=task["full"])
    yield Tally()


def receiver(task: dict[str, Any]) -> Iterator[Tally]:
    return receive_packs(task["endpoint"], task["rank"], _built if task["full"] else _touched)


ENDS: dict[str, Callable[[dict[str, Any]], Iterator[Tally]]] = {"send": sender, "receive": receiver}

if __name__ == "__main__":
    consume(ENDS[sys.argv[1]])
