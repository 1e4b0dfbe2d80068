"""Data sets as people publish them become shards: the ``prepare`` command without its command line.

Inputs are JSON Lines (``.jsonl``), JSON lists (``.json``) and text files (``.txt``, one document each), each
also with ``.gz``, and folders of them. The same inputs and settings give the same bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from packhorse.errors import ConfigError, SourceError
from packhorse_service.loading.decode import ContentEncoder, DecodingSpec
from packhorse_service.loading.tokenizer import TokenizerSpec
from packhorse_service.prepare.json_rows import Item, items_of
from packhorse_service.sources.formats import SampleFormat, TokenArrays
from packhorse_service.sources.npy import dump_array
from packhorse_service.sources.sample import BadSample
from packhorse_service.text.strict_json import read_json

__all__ = ["PrepareSummary", "prepare"]

MAX_SHARD_BYTES = 256 * 1024 * 1024
MAX_SHARD_SAMPLES = 100_000

Rows = Iterator[tuple[str, object]]  # where a row stands in its file, and the row


@dataclass(frozen=True, slots=True)
class PrepareSummary:
    """Summary of what ``prepare`` wrote. ``ids`` is ``None`` where nothing was tokenised."""

    shards: tuple[Path, ...]
    rows: int
    samples: int
    ids: int | None

    @property
    def pattern(self) -> str:
        """Pattern with braces that names all shards, for the ``shards`` of a source."""
        first, last = self.shards[0], self.shards[-1]
        if first == last:
            return str(first)
        return str(first.with_name(f"{first.stem[:-6]}{{{first.stem[-6:]}..{last.stem[-6:]}}}.tar"))


def prepare(
    inputs: Sequence[Path],
    out: Path,
    *,
    name: str = "data",
    source_format: SampleFormat | str = SampleFormat.AUTO,
    field: str | None = None,
    ignore_fields: Collection[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    max_shard_samples: int = MAX_SHARD_SAMPLES,
    tokenizer: TokenizerSpec | None = None,
    chat_template: str | None = None,
    date: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> PrepareSummary:
    """Write the rows of ``inputs`` to shards ``OUT/NAME-000000.tar`` …, and return what was written.

    A shard is closed when it holds ``max_shard_bytes`` of data or ``max_shard_samples`` samples. With a
    ``tokenizer`` ids are written (and loss masks for conversations), rendered with ``chat_template`` and
    ``date``; otherwise text and messages. Of a row's fields ``ignore_fields`` are left out. A progress bar goes to
    standard error where that is a terminal.

    All shards appear at the end, or none: they are written to a temporary folder beside their place.

    Raises ``ConfigError`` for arguments, also when shards of that name are there and ``overwrite`` is off;
    ``SourceError`` for a row that cannot be used, naming file and line.
    """
    chosen, ignored = _row_format(source_format), frozenset(ignore_fields)
    files = _find_files(inputs)
    old = _shards_of(out, name)
    if old and not overwrite:
        raise ConfigError(f"out={str(out)!r} already has {old[0].name}; choose another folder or name, or overwrite")
    encoder = None
    if tokenizer is not None:
        spec = DecodingSpec(name="prepare", tokenizer=tokenizer, chat_template=chat_template, date=date)
        encoder = ContentEncoder(spec)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=out) as folder:
        with _Writer(Path(folder), name, max_shard_bytes, max_shard_samples, encoder) as writer:
            for place, row in _read_rows(files, progress):
                writer.write(place, row, partial(items_of, field=field, sample_format=chosen, ignored=ignored))
        if not writer.samples:
            raise SourceError(f"{', '.join(str(file) for file in files)}: there are no rows")
        for path in old:
            path.unlink()
        shards = tuple(path.replace(out / path.name) for path in _shards_of(Path(folder), name))
    return PrepareSummary(shards, writer.rows, writer.samples, None if encoder is None else writer.ids)


class _Writer:
    """Rows to shards, through webdataset's writer with every varying field of a tar header fixed."""

    def __init__(
        self, folder: Path, name: str, max_bytes: int, max_samples: int, encoder: ContentEncoder | None
    ) -> None:
        from webdataset.writer import ShardWriter  # it imports torch, which takes seconds

        # The pattern is a %-format, and a folder may hold a % of its own.
        pattern = f"{str(folder / name).replace('%', '%%')}-%06d.tar"
        self._shards = ShardWriter(
            pattern, maxcount=max_samples, maxsize=max_bytes, verbose=0, encoder=False, mtime=0, user="", group=""
        )
        self._encoder = encoder
        self.rows = self.samples = self.ids = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.close()

    def write(self, place: str, row: object, read: Callable[[object], list[Item]]) -> None:
        """Write the samples of one row, numbered on as keys. Raises ``SourceError`` at ``place``."""
        try:
            for item in read(row):
                self._shards.write({"__key__": f"{self.samples:09d}"} | self._members(item))
                self.samples += 1
        except SourceError as error:
            raise SourceError(f"{place}: {error}") from error
        self.rows += 1

    def _members(self, item: Item) -> dict[str, bytes]:
        if self._encoder is None:
            return _plain_members(item)
        arrays = self._encoder.encode(item)
        self.ids += len(arrays.ids)
        return _token_members(arrays, self._encoder.id_limit)


def _plain_members(item: Item) -> dict[str, bytes]:
    if isinstance(item, str):
        return {"txt": _utf8(item)}
    return {"json": _utf8(json.dumps(item.as_json(), ensure_ascii=False))}


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadSample(
            f"its text has half of a surrogate pair at character {error.start}, which is not text"
        ) from error


def _token_members(arrays: TokenArrays, id_limit: int) -> dict[str, bytes]:
    """Return the members of a sample; all of a tokenizer have one dtype, the narrowest that holds its largest id."""
    dtype = np.promote_types(np.uint16, np.min_scalar_type(id_limit - 1)).newbyteorder("<")
    members = {"npy": dump_array(arrays.ids.astype(dtype))}
    if arrays.loss_mask is not None:
        members["loss_mask.npy"] = dump_array(arrays.loss_mask)
    return members


def _row_format(source_format: SampleFormat | str) -> SampleFormat:
    allowed = (SampleFormat.AUTO, SampleFormat.TEXT, SampleFormat.MESSAGES)
    if source_format not in allowed:
        raise ConfigError(f"source_format={str(source_format)!r} must be one of {', '.join(allowed)}")
    return SampleFormat(source_format)


def _shards_of(folder: Path, name: str) -> list[Path]:
    if not folder.is_dir():
        return []
    shard = re.compile(rf"{re.escape(name)}-\d{{6}}\.tar")
    return sorted(path for path in folder.iterdir() if shard.fullmatch(path.name))


def _kind_of(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _find_files(inputs: Sequence[Path]) -> list[Path]:
    known = ", ".join(READERS)
    files: list[Path] = []
    for path in inputs:
        if not path.exists():
            raise SourceError(f"{path}: there is no such file or folder")
        within = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        usable = [file for file in within if _kind_of(file) in READERS]
        if not usable:
            raise SourceError(
                f"{path}: it is not a file that can be read, and holds none; known are {known}, with or without .gz"
            )
        files.extend(usable)
    if not files:
        raise ConfigError("inputs is empty; name at least one file or folder")
    return files


def _read_rows(files: Sequence[Path], progress: bool) -> Rows:
    """Yield every row of ``files`` with its place: ``data.jsonl, line 7``."""
    total = sum(file.stat().st_size for file in files)
    with _bar(progress) as bar:
        task = bar.add_task("prepare", total=total)
        for file in files:
            with file.open("rb") as raw:
                yield from _read_file(file, bar.wrap_file(raw, total=total, task_id=task))


def _read_file(file: Path, stream: BinaryIO) -> Rows:
    if file.suffix == ".gz":
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=stream, mode="rb"))
    try:
        for where, row in READERS[_kind_of(file)](stream):
            yield f"{file}{where}", row
    except BadSample as error:
        raise SourceError(f"{file}{error}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise SourceError(f"{file}: its gzip stream is damaged ({error})") from error


def _json_lines(stream: BinaryIO) -> Rows:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield f", line {number}", _json(line, f", line {number}")


def _json_list(stream: BinaryIO) -> Rows:
    value = _json(stream.read(), "")
    if not isinstance(value, list):
        raise BadSample(": it holds one JSON value that is not a list; a .json file must hold a list of rows")
    for number, row in enumerate(value, start=1):
        yield f", row {number}", row


def _text_file(stream: BinaryIO) -> Rows:
    yield "", _decode(stream.read(), "")


def _json(raw: bytes, where: str) -> Any:
    text = _decode(raw, where)
    try:
        return read_json(text)
    except ValueError as error:
        raise BadSample(f"{where}: {error}") from error


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSample(f"{where}: it is not UTF-8 at byte {error.start} of it ({error.reason})") from error


READERS: dict[str, Callable[[BinaryIO], Rows]] = {".jsonl": _json_lines, ".json": _json_list, ".txt": _text_file}


@contextmanager
def _bar(wanted: bool) -> Iterator[Progress]:
    """Show bytes read, rate and time left on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not (wanted and console.is_terminal)
    ) as bar:
        yield bar
