"""Inputs that are almost valid: seeded mutations of valid ones, cheap enough for a million in a test run.

The same seed gives the same inputs, whatever machine it is on. ``bytes_like`` knows of bytes alone, ``trees_like``
of values as msgpack and JSON have them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["bytes_like", "leaves", "replaced", "trees_like"]

Tree = Any
Path = tuple[Any, ...]

MARKERS = bytes.fromhex("00 01 02 0f 10 7f 80 90 a0 c0 c1 c2 c4 c7 ca cf d3 d4 d9 dc dd de df e0 fe ff")
BYTES = MARKERS + b'09- \n"}'
EDGES = (0, 1, 2, 63, 64, 255, 256, (1 << 15) - 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62)
NUMBERS = (*EDGES, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def _flip(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    at = int(source.random() * len(data))
    data[at] ^= 1 << int(source.random() * 8)


def _set(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    data[int(source.random() * len(data))] = BYTES[int(source.random() * len(BYTES))]


def _cut(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    del data[int(source.random() * len(data)) :]


def _drop(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    at = int(source.random() * len(data))
    del data[at : at + 1 + int(source.random() ** 3 * 64)]


def _put_in(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    at = int(source.random() * len(data))
    data[at:at] = source.randbytes(1 + int(source.random() ** 3 * 64))


def _repeat(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    at = int(source.random() * len(data))
    data[at:at] = data[at : at + 1 + int(source.random() ** 2 * 512)]


def _splice(data: bytearray, source: random.Random, others: Sequence[bytes]) -> None:
    """The beginning of one and the rest of another."""
    other = others[int(source.random() * len(others))]
    at = source.random()
    data[int(at * len(data)) :] = other[int(at * len(other)) :]


def _number(data: bytearray, source: random.Random, _others: Sequence[bytes]) -> None:
    """A length or a count, in either byte order."""
    size = (1, 2, 4, 8)[int(source.random() * 4)]
    number = NUMBERS[int(source.random() * len(NUMBERS))] & ((1 << 8 * size) - 1)
    at = int(source.random() * len(data))
    data[at : at + size] = number.to_bytes(size, "little" if source.random() < 0.5 else "big")


MUTATIONS: tuple[Callable[[bytearray, random.Random, Sequence[bytes]], None], ...] = (
    *(_flip, _flip, _set, _set, _number, _number),
    *(_cut, _drop, _put_in, _repeat, _splice),
)


def bytes_like(valid: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """``count`` inputs, each one to three mutations away from one of ``valid``."""
    source = random.Random(seed)
    for number in range(count):
        data = bytearray(valid[number % len(valid)])
        for _ in range(1 + int(source.random() ** 2 * 3)):
            if data:
                MUTATIONS[int(source.random() * len(MUTATIONS))](data, source, valid)
        yield bytes(data)


# Trees -----------------------------------------------------------------------------------------------

JUNK: tuple[Tree, ...] = (
    *(None, True, False, 0, 1, -1, *NUMBERS, 0.0, -1.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\0", "a" * 300, "train", "\ud7ff\U0001f40e", [], [0], [[]], {}, {"": None}, [None] * 40),
)


def leaves(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """The way to every value in a tree, containers included."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def replaced(tree: Tree, path: Path, value: Tree) -> Tree:
    """The tree with another value at the end of this way; nothing else is copied."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


def _without(tree: Tree, path: Path) -> Tree:
    if len(path) > 1:
        return replaced(tree, path[:1], _without(tree[path[0]], path[1:]))
    copy = tree.copy()
    del copy[path[0]]
    return copy


def _value(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def trees_like(valid: Sequence[Tree], count: int, seed: int, junk: Sequence[Tree] = JUNK) -> Iterator[Tree]:
    """``count`` trees, each of which differs in one to three values from one of ``valid``."""
    source = random.Random(seed)
    ways = [list(leaves(tree)) for tree in valid]
    values = [_value(tree, way) for tree, of_tree in zip(valid, ways, strict=True) for way in of_tree]
    for number in range(count):
        tree, of_tree = valid[number % len(valid)], ways[number % len(valid)]
        first = of_tree[int(source.random() * len(of_tree))]
        match int(source.random() * 8):
            case 0:
                tree = _without(tree, first)
            case 1:  # what stands elsewhere
                tree = replaced(tree, first, values[int(source.random() * len(values))])
            case 2 if isinstance(near := _value(tree, first), int):
                tree = replaced(tree, first, near + int(source.random() * 5) - 2)
            case 3 if isinstance(listed := _value(tree, first), list):
                tree = replaced(tree, first, listed + listed)
            case _:
                tree = replaced(tree, first, junk[int(source.random() * len(junk))])
        yield tree
