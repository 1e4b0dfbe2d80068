"""What a sample's members mean: text, a conversation, or ids.

| format   | members                                    | gives           |
|----------|--------------------------------------------|-----------------|
| text     | ``.txt``                                   | ``str``         |
| messages | ``.json``                                  | ``Conversation``|
| tokens   | ``.npy`` or ``.tokens.npy``; optional ``.loss_mask.npy``, ``.labels.npy`` | ``TokenArrays`` |

``auto`` takes the one whose members a sample has. A member that is not read is refused, unless the source names its
extension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse_service.sources.messages import Conversation, parse_conversation
from packhorse_service.sources.npy import join_arrays, load_array
from packhorse_service.sources.sample import BadSample, content_of
from packhorse_service.sources.tar.columnar import ColumnarSamples
from packhorse_service.sources.tar.grouping import Sample
from packhorse_service.sources.tar.reader import TarMember
from packhorse_service.text.strict_json import read_json

__all__ = ["Content", "SampleFormat", "TokenArrays", "TokenColumns", "decode", "decode_columnar"]


class SampleFormat(StrEnum):
    """Format in which the samples of a source are stored."""

    AUTO = "auto"
    TEXT = "text"
    MESSAGES = "messages"
    TOKENS = "tokens"


class TokenArrays(NamedTuple):
    """A tokenised sample of n ids; numbers as stored, not yet checked against the vocabulary."""

    ids: npt.NDArray[Any]  # [n] integers
    loss_mask: npt.NDArray[Any] | None = None  # [n] 1 where predicting that id is trained on; None = everywhere
    labels: npt.NDArray[Any] | None = None  # [n] already shifted; None = the next id


class TokenColumns(NamedTuple):
    """The tokenised samples of a block, n of N ids together; numbers as stored."""

    counts: npt.NDArray[np.int64]  # [n] ids of each sample
    ids: npt.NDArray[Any]  # [N]
    loss_mask: npt.NDArray[Any] | None  # [N]
    labels: npt.NDArray[Any] | None  # [N]


Content = str | Conversation | TokenArrays

TEXT, MESSAGES, IDS = ("txt",), ("json",), ("npy", "tokens.npy")
LOSS_MASK, LABELS = "loss_mask.npy", "labels.npy"


def decode(
    sample: Sample, sample_format: SampleFormat, ignored: Collection[str] = (), unread: Collection[str] = ()
) -> Content:
    """Return what ``sample`` holds, read as ``sample_format``, without the fields ``ignored``.

    Raises ``BadSample``, for a member too that the format does not read and that is not among the extensions
    ``unread``.
    """
    chosen = sample_format
    if unread:
        sample = sample._replace(members={name: m for name, m in sample.members.items() if name not in unread})
    if sample_format is SampleFormat.AUTO:
        chosen = _format_of(sample)
    extensions, decoder = DECODERS[chosen]
    if not any(extension in sample.members for extension in extensions):
        raise BadSample(f"{_has(sample)}; format '{sample_format}' reads {_dotted(extensions)}")
    if sample.members.keys() - READ[chosen]:
        _refuse_unread(sample, chosen)
    return decoder(sample, ignored)


def _refuse_unread(sample: Sample, chosen: SampleFormat) -> None:
    extension, member = next((name, m) for name, m in sample.members.items() if name not in READ[chosen])
    raise BadSample(
        f"format '{chosen}' does not read this member, but {_dotted(tuple(sorted(READ[chosen])))}. Rename it if it is "
        f"one of these, or name it in the source's ignore_members: [{extension}]",
        member,
    )


def decode_columnar(samples: ColumnarSamples, unread: Collection[str] = ()) -> TokenColumns | None:
    """Return all ids of ``samples``; ``None`` unless ``decode`` finds ``TokenArrays`` in each, of the same dtypes."""
    columns = {extension: column for extension, column in samples.columns.items() if extension not in unread}
    joined = {
        extension: arrays
        for extension, column in columns.items()
        if extension in READ[SampleFormat.TOKENS] and (arrays := join_arrays(column)) is not None
    }
    ids = [joined[extension] for extension in IDS if extension in joined]
    if len(joined) < len(columns) or len(ids) != 1:
        return None
    counts = ids[0].counts
    integers = all(arrays.values.dtype.kind in "iu" for extension, arrays in joined.items() if extension != LOSS_MASK)
    if not integers or not all(np.array_equal(arrays.counts, counts) for arrays in joined.values()):
        return None
    mask, labels = (joined[extension].values if extension in joined else None for extension in (LOSS_MASK, LABELS))
    return TokenColumns(counts, ids[0].values, mask, labels)


def _format_of(sample: Sample) -> SampleFormat:
    fitting = _fitting(tuple(sample.members))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadSample(f"{_has(sample)}, which fit the formats {' and '.join(fitting)}; set the source's format")
    known = ", ".join(f"{name} ({_dotted(extensions)})" for name, (extensions, _) in DECODERS.items())
    raise BadSample(f"{_has(sample)}, none of which is read; the formats known are {known}")


@lru_cache(maxsize=1024)
def _fitting(extensions: tuple[str, ...]) -> tuple[SampleFormat, ...]:
    return tuple(name for name, (known, _) in DECODERS.items() if not set(known).isdisjoint(extensions))


def _decode_text(sample: Sample, _ignored: Collection[str]) -> str:
    return _utf8(sample.members["txt"])


def _decode_messages(sample: Sample, ignored: Collection[str]) -> Conversation:
    member = sample.members["json"]
    text = _utf8(member)
    try:
        value = read_json(text)
    except ValueError as error:
        raise BadSample(str(error), member) from error
    return parse_conversation(value, ignored)


def _decode_tokens(sample: Sample, _ignored: Collection[str]) -> TokenArrays:
    members = sample.members
    if "npy" in members and "tokens.npy" in members:
        raise BadSample("it has both .npy and .tokens.npy; keep one, the ids")
    member = members.get("npy") or members["tokens.npy"]
    ids = _integers(member, "ids")
    mask = members.get(LOSS_MASK)
    labels = members.get(LABELS)
    return TokenArrays(
        ids,
        None if mask is None else _same_length(_zeros_and_ones(mask), ids, mask),
        None if labels is None else _same_length(_integers(labels, "labels"), ids, labels),
    )


def _utf8(member: TarMember) -> str:
    try:
        return content_of(member).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSample(
            f"it is not UTF-8 at byte {error.start} of the member ({error.reason}); convert it to UTF-8", member
        ) from error


def _integers(member: TarMember, what: str) -> npt.NDArray[Any]:
    values = load_array(member)
    if values.dtype.kind not in "iu":
        raise BadSample(f"its dtype is {values.dtype}; {what} must be integers", member)
    return values


def _zeros_and_ones(member: TarMember) -> npt.NDArray[Any]:
    """Return a loss mask. Integers are checked later, for a whole block at once; floats are rare and checked here."""
    mask = load_array(member)
    if mask.dtype.kind != "f":
        return mask
    fractional = mask[(mask != 0) & (mask != 1)]
    if fractional.size:
        raise BadSample(
            f"it holds the loss weight {fractional[0]:g}; weights are 0 or 1, fractional ones are not supported", member
        )
    return mask.astype(np.uint8)


def _same_length(values: npt.NDArray[Any], ids: npt.NDArray[Any], member: TarMember) -> npt.NDArray[Any]:
    if len(values) != len(ids):
        raise BadSample(f"it has {len(values)} values and the sample has {len(ids)} ids; they must be as many", member)
    return values


def _has(sample: Sample) -> str:
    return f"the sample's members are {', '.join(repr(member.name) for member in sample.members.values())}"


def _dotted(extensions: tuple[str, ...]) -> str:
    return " or ".join(f".{extension}" for extension in extensions)


DECODERS: dict[SampleFormat, tuple[tuple[str, ...], Callable[[Sample, Collection[str]], Content]]] = {
    SampleFormat.TEXT: (TEXT, _decode_text),
    SampleFormat.MESSAGES: (MESSAGES, _decode_messages),
    SampleFormat.TOKENS: (IDS, _decode_tokens),
}
READ: dict[SampleFormat, frozenset[str]] = {
    SampleFormat.TEXT: frozenset(TEXT),
    SampleFormat.MESSAGES: frozenset(MESSAGES),
    SampleFormat.TOKENS: frozenset((*IDS, LOSS_MASK, LABELS)),
}
