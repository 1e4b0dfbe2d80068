"""One block of a shard becomes tokens: what a loader worker runs.

``BlockLoader.load`` is a pure function of its request, the data and the specs. It keeps tokenizers and
templates, and no state from one block to the next, so any worker may load any block, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.block import BlockRequest, Fault, TokenBlock
from packhorse_service.loading.chat import ChatEncoder
from packhorse_service.loading.token_block import build_block, build_columnar_block, sample_fault
from packhorse_service.loading.tokenizer import Tokenizer, TokenizerSpec
from packhorse_service.sources.content import ChangeWatch
from packhorse_service.sources.formats import SampleFormat, TokenArrays, decode, decode_columnar
from packhorse_service.sources.messages import Conversation
from packhorse_service.sources.rendering import CHATML, ChatTemplate
from packhorse_service.sources.sample import BadSample
from packhorse_service.sources.shards import open_shard
from packhorse_service.sources.tar.columnar import ReusableBuffer, read_columnar
from packhorse_service.sources.tar.grouping import Sample, group_samples
from packhorse_service.sources.tar.reader import describe_member, read_members

__all__ = ["BLOCK_BYTES", "BlockLoader", "ContentEncoder", "DecodingSpec"]

BLOCK_BYTES = 1024 * 1024

# A network file system that hiccups is back within seconds; what fails longer is for a person to see.
RETRY_PAUSES_S = (0.1, 0.5, 2.0)

ID_LIMIT = int(np.iinfo(np.uint32).max) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSpec:
    """Specification of how the samples of one source become ids. Raises ``ConfigError`` where it cannot work."""

    name: str  # of the source
    format: SampleFormat = SampleFormat.AUTO
    tokenizer: TokenizerSpec | None = None  # not needed for ids
    chat_template: str | None = None  # the template's text; None = CHATML
    date: str | None = None  # YYYY-MM-DD, what strftime_now gives to a template
    vocab_size: int | None = None  # ids are below it; None = the tokenizer's
    ignore_fields: frozenset[str] = frozenset()  # of conversations: left out though they say something
    ignore_members: frozenset[str] = frozenset()  # extensions of members that nobody reads
    block_bytes: int = BLOCK_BYTES  # of the shard's stream: a block ends with the sample that reaches it

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ConfigError(f"source {self.name!r}: block_bytes={self.block_bytes} must be at least 1")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= ID_LIMIT:
            raise ConfigError(f"source {self.name!r}: vocab_size={self.vocab_size} must be 1 … {ID_LIMIT}")
        if self.tokenizer is None and self.format in (SampleFormat.TEXT, SampleFormat.MESSAGES):
            raise ConfigError(
                f"source {self.name!r}: format={str(self.format)!r} needs a tokenizer; set tokenizer.file"
            )


class ContentEncoder:
    """Encoder of one source's samples: what they hold → ids.

    ``vocab_size`` is the limit that the ids of the source keep, ``id_limit`` that of those the tokenizer gives.
    """

    def __init__(self, spec: DecodingSpec) -> None:
        self._name = spec.name
        self._tokenizer = None if spec.tokenizer is None else Tokenizer(spec.tokenizer)
        self._chat: ChatEncoder | None = None
        if self._tokenizer is not None:
            source = CHATML if spec.chat_template is None else spec.chat_template
            template = ChatTemplate(source, spec.date, self._tokenizer.special_tokens)
            self._chat = ChatEncoder(template, self._tokenizer)
            if spec.chat_template is not None or spec.format is SampleFormat.MESSAGES:
                self._chat.require_markers()
        own = ID_LIMIT if self._tokenizer is None else self._tokenizer.vocab_size
        self.id_limit = own if self._tokenizer is None else self._tokenizer.id_limit
        self.vocab_size = own if spec.vocab_size is None else spec.vocab_size

    def encode(self, content: str | Conversation | TokenArrays) -> TokenArrays:
        """Return the ids of ``content``. Raises ``BadSample``, or ``ConfigError`` when a tokenizer is missing."""
        if isinstance(content, TokenArrays):
            return content
        if self._tokenizer is None or self._chat is None:
            raise ConfigError(f"source {self._name!r} holds text and names no tokenizer; set tokenizer.file")
        if isinstance(content, str):
            return TokenArrays(self._tokenizer.encode(content))
        return self._chat.encode(content)


class BlockLoader:
    """Loader of blocks of the sources in ``specs``, by name. ``sleep`` is called between tries of a read."""

    def __init__(self, specs: Mapping[str, DecodingSpec], sleep: Callable[[float], None] = time.sleep) -> None:
        self._specs = dict(specs)
        self._encoders = {name: ContentEncoder(spec) for name, spec in specs.items()}
        self._sleep = sleep
        self._buffer = ReusableBuffer()
        self._changes = ChangeWatch()

    def load(self, request: BlockRequest) -> TokenBlock:
        """Return the block that starts at ``request``.

        What is wrong with one sample's content becomes a ``Fault`` in the block. Raises ``SourceError`` when
        the shard is missing, damaged or has no samples, when keys repeat, and when reading fails repeatedly.
        """
        spec = self._specs[request.source]
        encoder = self._encoders[request.source]
        shard = request.shard.name
        found = self._read(request, spec, encoder.vocab_size)
        if isinstance(found, TokenBlock):
            return found
        arrays = [_decode(index, sample, shard, spec, encoder) for index, sample in enumerate(found)]
        return build_block(found, arrays, shard=shard, vocab_size=encoder.vocab_size)

    def _read(self, request: BlockRequest, spec: DecodingSpec, vocab_size: int) -> TokenBlock | list[Sample]:
        """Read, and try again where that fails: skipping what cannot be read would make a replay differ."""
        shard = request.shard
        for pause in (*RETRY_PAUSES_S, None):
            try:
                with open_shard(shard) as stream:
                    self._changes.check(stream, shard)
                    block = _load_columnar(stream, request, spec, vocab_size, self._buffer)
                    return _read_samples(stream, request, spec.block_bytes) if block is None else block
            except FileNotFoundError as error:
                raise SourceError(
                    f"shard {shard.name!r}: there is no file {shard.url!r} any more; put it back"
                ) from error
            except OSError as error:
                if pause is None:
                    raise SourceError(
                        f"shard {shard.name!r} at byte {request.offset}: reading {shard.url!r} failed "
                        f"{len(RETRY_PAUSES_S) + 1} times: {error}; check the file system"
                    ) from error
                self._sleep(pause)
        raise AssertionError("the last try returns or raises")


def _load_columnar(
    stream: BinaryIO, request: BlockRequest, spec: DecodingSpec, vocab_size: int, buffer: ReusableBuffer
) -> TokenBlock | None:
    """Return the block if it holds good ids alone, in samples that are alike: nothing is then done for each."""
    if spec.format not in (SampleFormat.AUTO, SampleFormat.TOKENS):
        return None
    samples = read_columnar(stream, request.offset, spec.block_bytes, buffer)
    columns = None if samples is None else decode_columnar(samples, spec.ignore_members)
    if samples is None or columns is None:
        return None
    return build_columnar_block(samples, columns, vocab_size=vocab_size)


def _read_samples(stream: BinaryIO, request: BlockRequest, block_bytes: int) -> list[Sample]:
    """Return the samples of a block: the last is the one with which ``block_bytes`` of the stream are reached."""
    samples: list[Sample] = []
    shard = request.shard.name
    for sample in group_samples(read_members(stream, request.offset, shard=shard), shard=shard):
        samples.append(sample)
        if sample.next_offset is not None and sample.next_offset - request.offset >= block_bytes:
            return samples
    if not samples:
        raise SourceError(
            f"shard {shard!r} at byte {request.offset}: there are no samples from here on; a sample is a file named "
            "KEY.EXTENSION. Copy the shard again or take it out of the source"
        )
    return samples


def _decode(index: int, sample: Sample, shard: str, spec: DecodingSpec, encoder: ContentEncoder) -> TokenArrays | Fault:
    try:
        return encoder.encode(decode(sample, spec.format, spec.ignore_fields, spec.ignore_members))
    except BadSample as error:
        return sample_fault(index, sample, shard, error)
    except SourceError as error:
        raise SourceError(f"{describe_member(shard, sample.first)}: {error}") from error
