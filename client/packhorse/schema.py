"""msgpack headers with an exact schema, compiled from the annotations of dataclasses and Structs.

A header is untrusted input: its size is capped before it is decoded, and a key that is missing, unknown or given
twice, a value of another type, an extension type or a number out of range is a ``ProtocolError`` that names the
field. Nothing is coerced.

There are two ways to decode. ``decoder_for`` compiles checkers that know each field by name. ``exact_reader`` lets
msgspec decode what comes for every micro-batch, and takes only what the first way would take: so it refuses, when a
module is imported, a kind of which msgspec would check less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import msgspec

from packhorse.errors import ConfigError, ProtocolError

__all__ = [
    "HEADER_LIMIT_BYTES",
    "INTEGER_LIMIT",
    "Whole",
    "decoder_for",
    "exact_reader",
    "map_decoder",
    "pack",
    "unpack",
]

HEADER_LIMIT_BYTES = 16 << 10
INTEGER_LIMIT = 1 << 62
ENCODER = msgspec.msgpack.Encoder()

# A number on the wire that is never negative.
Whole = Annotated[int, msgspec.Meta(ge=0, lt=INTEGER_LIMIT)]

Decoder = Callable[[object, str], Any]
Kind = TypeVar("Kind")
Made = TypeVar("Made")


def pack(value: object) -> bytes:
    """Return a header as msgpack; dataclasses and Structs become maps."""
    return ENCODER.encode(value)


def exact_reader(tag: str, kind: type[Kind]) -> Callable[[bytes], Kind | None]:
    """Return a reader of headers that are byte for byte what ``pack`` makes of ``(tag, kind)``.

    It makes no object for each value, and returns ``None`` for any other header: ``decoder_for`` reads that, or says
    what is wrong with it. Raises ``TypeError`` where an integer of ``kind`` is not declared as ``Whole``: msgspec would
    not check its range.
    """
    unchecked = list(_integers_without_range(kind, tag))
    if unchecked:
        raise TypeError(f"{', '.join(unchecked)} must be declared as Whole, or their range is not checked")
    decoder = msgspec.msgpack.Decoder(tuple[str, kind])  # type: ignore[valid-type]

    def read(frame: bytes) -> Kind | None:
        try:
            header: tuple[str, Kind] = decoder.decode(frame)
        except (msgspec.MsgspecError, ProtocolError, RecursionError):
            return None
        # A key that is unknown or given twice, or another form of a number, is not packed again.
        return header[1] if header[0] == tag and ENCODER.encode(header) == frame else None

    return read


def _integers_without_range(hint: Any, where: str) -> Iterator[str]:
    """Yield where an annotation has an ``int`` that is not ``Whole``, in whatever it is made of."""
    if hint is int:
        yield where
    elif hasattr(hint, "__annotations__"):
        for name, inner in get_type_hints(hint, include_extras=True).items():
            yield from _integers_without_range(inner, f"{where}.{name}")
    elif hint is not Whole:
        for inner in get_args(hint):
            yield from _integers_without_range(inner, where)


def unpack(frame: bytes | memoryview, limit_bytes: int = HEADER_LIMIT_BYTES) -> object:
    """Decode one header frame into plain values. Raise ``ProtocolError`` where it is too long, or no plain msgpack."""
    if len(frame) > limit_bytes:
        raise ProtocolError(f"a header of {len(frame)} bytes is over the limit of {limit_bytes}")
    try:
        return msgpack.unpackb(frame, object_pairs_hook=_no_duplicates, ext_hook=_no_extensions, max_ext_len=16)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a header is not valid msgpack: {error}") from error


def _no_duplicates(pairs: list[tuple[object, object]]) -> dict[object, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_extensions(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code} is not allowed")


def _wrong(where: str, want: str, got: object) -> ProtocolError:
    return ProtocolError(f"{where} must be {want}, got {type(got).__name__} {str(got)[:80]!r}")


def _integer(value: object, where: str) -> int:
    # bool is an int in Python, not on our wire.
    if type(value) is not int or not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        raise _wrong(where, "an integer below 2⁶²", value)
    return value


def _number(value: object, where: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise _wrong(where, "a finite float", value)
    return value


def _plain(kind: type) -> Decoder:
    def decode(value: object, where: str) -> object:
        if type(value) is not kind:
            raise _wrong(where, kind.__name__, value)
        return value

    return decode


def _enum(kind: type[StrEnum]) -> Decoder:
    def decode(value: object, where: str) -> StrEnum:
        if type(value) is not str or value not in list(kind):
            raise _wrong(where, f"one of {', '.join(kind)}", value)
        return kind(value)

    return decode


def _optional(inner: Decoder) -> Decoder:
    return lambda value, where: None if value is None else inner(value, where)


def _sequence(inner: Decoder) -> Decoder:
    def decode(value: object, where: str) -> tuple[object, ...]:
        if type(value) is not list:
            raise _wrong(where, "an array", value)
        return tuple(inner(item, where) for item in value)

    return decode


def _record(items: tuple[Decoder, ...], make: Callable[..., object]) -> Decoder:
    """Return the decoder of an array of fixed length: a tuple or a NamedTuple."""

    def decode(value: object, where: str) -> object:
        if type(value) is not list or len(value) != len(items):
            raise _wrong(where, f"an array of {len(items)}", value)
        return make(*(item(part, where) for item, part in zip(items, value, strict=True)))

    return decode


def map_decoder(inner: Mapping[str, Decoder], make: Callable[..., Made]) -> Callable[[object, str], Made]:
    """Return the decoder of a map of exactly these keys; ``make`` gets their values by name."""

    def decode(value: object, where: str) -> Made:
        if type(value) is not dict or value.keys() != inner.keys():
            got = value.keys() ^ inner.keys() if type(value) is dict else value
            raise _wrong(where, f"a map of exactly {', '.join(inner)}", got)
        values = {name: item(value[name], f"{where}.{name}") for name, item in inner.items()}
        try:
            return make(**values)
        except ConfigError as error:
            raise ProtocolError(f"{where}: {error}") from error

    return decode


def _map(kind: type) -> Decoder:
    return map_decoder({name: decoder_for(hint) for name, hint in get_type_hints(kind).items()}, kind)


def _tuple(hint: Any) -> Decoder:
    args = get_args(hint)
    if len(args) == 2 and args[1] is Ellipsis:
        return _sequence(decoder_for(args[0]))
    return _record(tuple(decoder_for(arg) for arg in args), lambda *items: items)


PLAIN: dict[object, Decoder] = {
    int: _integer,
    float: _number,
    str: _plain(str),
    bytes: _plain(bytes),
    bool: _plain(bool),
}


@cache
def decoder_for(hint: Any) -> Decoder:
    """Return the decoder of an annotation: scalars, enums, tuples, NamedTuples, dataclasses, Structs, optionals."""
    if hint in PLAIN:
        return PLAIN[hint]
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not NoneType)
        return _optional(decoder_for(inner))
    if get_origin(hint) is tuple:
        return _tuple(hint)
    if issubclass(hint, StrEnum):
        return _enum(hint)
    if issubclass(hint, tuple):
        return _record(tuple(decoder_for(h) for h in get_type_hints(hint).values()), hint)
    return _map(hint)
