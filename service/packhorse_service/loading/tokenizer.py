"""Text becomes ids, with a ``tokenizers`` JSON file (``tokenizer.json`` of a Hugging Face model)."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers.processors import ByteLevel

from packhorse.errors import ConfigError

__all__ = ["Tokenizer", "TokenizerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """Specification of a tokenizer, and of what must hold for it. ``None`` asks for nothing."""

    file: str
    eos_token: str | None = None  # appended to each text document; templates see it too
    bos_token: str | None = None  # for chat templates that name it
    vocab_size: int | None = None  # of the model: the tokenizer may not have more ids
    digest: str | None = None  # of the file, as ``Tokenizer.digest`` gives it


class Tokenizer:
    """A tokenizer file, loaded. ``digest`` is the file's BLAKE2b-16 in hex.

    ``id_limit`` is one more than the largest id that it can give, added tokens included and gaps or not;
    ``vocab_size`` that of the model, where the specification has it, else ``id_limit``.

    Raises ``ConfigError`` when the file is missing, not a tokenizer, another one than ``digest`` says, has
    larger ids than the model, or does not know a special token.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        content = _read(spec.file)
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        if spec.digest is not None and spec.digest != self.digest:
            raise ConfigError(
                f"tokenizer.file={spec.file!r} has digest {self.digest}, expected {spec.digest}: it is another "
                "tokenizer, whose ids differ"
            )
        self._tokenizer = _parse(content, spec.file)
        self.id_limit: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if spec.vocab_size is not None and self.id_limit > spec.vocab_size:
            raise ConfigError(
                f"tokenizer.vocab_size={spec.vocab_size} must be more than the largest id of {spec.file!r}, "
                f"{self.id_limit - 1}; set it to the model's (padded) vocabulary size"
            )
        self._modelled = spec.vocab_size
        self.vocab_size: int = self.id_limit if spec.vocab_size is None else spec.vocab_size
        named = {"eos_token": spec.eos_token, "bos_token": spec.bos_token}
        self.special_tokens = {field: token for field, token in named.items() if token is not None}
        for field, token in self.special_tokens.items():
            self._require(token, field)
        added = self._tokenizer.get_added_tokens_decoder().values()
        # What a chat turn may end in: no text holds it by chance.
        special = {token.content for token in added if token.special} | {spec.eos_token or ""}
        self.special_texts = frozenset(text for text in special if text and self.knows(text))
        self._eos_ids = [] if spec.eos_token is None else [self._tokenizer.token_to_id(spec.eos_token)]

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids [n] of a text document, ``eos_token`` appended where set; no other token is added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids + self._eos_ids, dtype=np.uint32)

    def encode_marked(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Return the ids [n] of rendered ``text`` and their loss mask [n].

        An id is trained on (1) when its first character lies in one of ``spans``, which are [start, end) in
        characters, ascending and apart.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
        # Between the borders start0, end0, start1, end1 …, an odd count lies at or before what is inside a span.
        borders = np.array(spans, dtype=np.int64).reshape(-1)
        inside = np.searchsorted(borders, starts, side="right") % 2
        return np.array(encoding.ids, dtype=np.uint32), inside.astype(np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def knows(self, text: str) -> bool:
        """Return whether ``text`` is read as one token; to stand in the vocabulary is not enough."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids) == 1

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ConfigError`` unless ``vocab_size`` of a contract is the model's, or holds every id there is."""
        if self._modelled not in (None, vocab_size):
            raise ConfigError(
                f"contract.vocab_size={vocab_size} and tokenizer.vocab_size={self._modelled} are both the model's "
                "vocabulary; set one of them, or both to the same"
            )
        if vocab_size < self.id_limit:
            raise ConfigError(
                f"contract.vocab_size={vocab_size} must be more than the tokenizer's largest id, {self.id_limit - 1}; "
                "set it to the model's (padded) vocabulary size, or name the tokenizer of that model"
            )

    def _require(self, token: str, field: str) -> None:
        if token and self._tokenizer.token_to_id(token) is None:
            added = [added.content for added in self._tokenizer.get_added_tokens_decoder().values()]
            nearest = difflib.get_close_matches(token, added or self._tokenizer.get_vocab(), n=1, cutoff=0.0)
            raise ConfigError(
                f"tokenizer.{field}={token!r} is not in the vocabulary; the nearest token is {nearest[0]!r}"
            )


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer.file={file!r} cannot be read: {error.strerror}; name a tokenizer.json") from error


def _parse(content: bytes, file: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(
            f"tokenizer.file={file!r} is not a tokenizer file ({error}); it must be the JSON of the tokenizers "
            "library, tokenizer.json of a Hugging Face model"
        ) from error
    # A file may carry what its author once cut or padded to.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Trimmed offsets leave a newline token empty and on the border of the next span. No special token is asked for,
    # so nothing else of the file's own post-processor is lost.
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    return tokenizer
