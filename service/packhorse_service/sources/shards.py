"""Which shards a source has, in which order, and how one is opened.

A pattern is a path or a URL with braces (``docs-{000000..000003}.tar``) and ``*``, as ``webdataset`` and
a shell write it. Anything with a scheme (``s3://``, ``gs://``, ``file://``, ``memory://`` …) goes through
fsspec; what ``webdataset`` would hand to a shell is refused by name.
"""

from __future__ import annotations

import glob
import io
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
from braceexpand import braceexpand

from packhorse.errors import SourceError

__all__ = ["Shard", "expand_shards", "open_shard"]

# One read ahead of the parser: a system call is rare, and the read of a block ends with a whole one.
BUFFER_BYTES = 64 * 1024

# webdataset runs a command for each of these; fsspec has no reader of its own for them.
SHELL_SCHEMES = ("pipe", "ais", "htgs", "scp", "ftps")


class _Found(NamedTuple):
    root: str  # "" for local paths, else the file system, as in "s3"
    path: str  # absolute within the root: names and duplicates are told by it
    url: str  # what opens it
    size: int  # bytes, as stored


def expand_shards(patterns: Sequence[str], base: Path) -> tuple[Shard, ...]:
    """Return the shards of ``patterns`` in the order written; a ``*`` gives its matches sorted.

    Relative paths start at ``base``. ``Shard.name`` is relative to the directory that all shards share, so
    the same data under another path has the same names.

    Raises ``SourceError`` when there is no pattern, a shard is missing, empty or listed twice, a ``*``
    matches nothing, or one source mixes file systems.
    """
    if not patterns:
        raise SourceError("shards: the list is empty; name at least one shard, for example 'docs-{000000..000003}.tar'")
    found = [shard for pattern in patterns for shard in _expand(pattern, base)]
    _refuse_mixed_roots(found)
    _refuse_repeats(found)
    common = posixpath.commonpath([posixpath.dirname(shard.path) for shard in found])
    return tuple(Shard(posixpath.relpath(shard.path, common or "."), shard.url, shard.size) for shard in found)


def open_shard(shard: Shard) -> BinaryIO:
    """Open ``shard`` for reading from any offset, buffered. Raises ``OSError`` as the file system does."""
    if shard.is_file:
        return open(shard.url, "rb", buffering=BUFFER_BYTES)
    remote = fsspec.open(shard.url, "rb").open()
    return cast(BinaryIO, io.BufferedReader(remote, BUFFER_BYTES))


def _expand(pattern: str, base: Path) -> list[_Found]:
    try:
        names = list(braceexpand(pattern))
    except ValueError as error:
        raise SourceError(f"shards: pattern {pattern!r} has unbalanced braces; escape a literal one with \\") from error
    for name in (pattern, *names):
        _refuse_shell(name)
    if "://" in pattern:
        return [shard for name in names for shard in _remote(name, pattern)]
    return [shard for name in names for shard in _local(name, pattern, base)]


def _refuse_shell(name: str) -> None:
    scheme = name.partition(":")[0].lower()
    if scheme == "pipe" or (scheme in SHELL_SCHEMES and "://" in name) or name == "-":
        raise SourceError(
            f"shards: {name!r} is a form that webdataset hands to a shell or a standard stream, which is never done "
            "here: a shard is read from any offset, again and again; name a file, or a URL that fsspec reads (s3://, "
            "gs://, https:// …)"
        )
    if "::" in name:
        raise SourceError(f"shards: {name!r} joins several with '::'; write them as a list")


def _local(name: str, pattern: str, base: Path) -> list[_Found]:
    path = os.path.abspath(base / name)
    if os.path.lexists(path) or not glob.has_magic(name):
        paths = [path]
    else:
        # Only the pattern may hold wildcards: `base` is a directory, whatever its name looks like.
        paths = sorted(os.path.abspath(base / match) for match in glob.glob(name, root_dir=base))
        _refuse_no_match(paths, name, pattern)
    return [_Found("", Path(path).as_posix(), path, _size(path, pattern, _local_size)) for path in paths]


def _remote(url: str, pattern: str) -> list[_Found]:
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SourceError(f"shards: {url!r} cannot be opened: {error}") from error
    if "*" in path:
        paths = sorted(system.glob(path))
        _refuse_no_match(paths, url, pattern)
    else:
        paths = [path]
    protocol = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
    return [
        _Found(
            protocol, path, system.unstrip_protocol(path), _size(path, pattern, lambda path: _remote_size(system, path))
        )
        for path in paths
    ]


def _local_size(path: str) -> int:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"it is a directory; write {os.path.basename(path)}/*.tar for the shards in it")
    return status.st_size


def _remote_size(system: Any, path: str) -> int:
    size = system.info(path)["size"]
    if size is None:
        raise OSError("its server does not tell the size")
    return int(size)


def _size(path: str, pattern: str, measure: Callable[[str], int]) -> int:
    name = posixpath.basename(path)
    try:
        size = measure(path)
    except FileNotFoundError as error:
        raise SourceError(f"shard {name!r}: there is no file {path!r}, which pattern {pattern!r} names") from error
    except OSError as error:
        raise SourceError(f"shard {name!r}: {path!r} cannot be used: {error}") from error
    if size == 0:
        raise SourceError(f"shard {name!r}: {path!r} is empty (0 bytes); copy it again or take it out of {pattern!r}")
    return size


def _refuse_no_match(paths: Sequence[str], name: str, pattern: str) -> None:
    if not paths:
        raise SourceError(f"shards: nothing matches {name!r} of pattern {pattern!r}")


def _refuse_mixed_roots(found: Iterable[_Found]) -> None:
    roots = sorted({shard.root or "local files" for shard in found})
    if len(roots) > 1:
        raise SourceError(f"shards: one source mixes {' and '.join(roots)}; make it one source for each")


def _refuse_repeats(found: Iterable[_Found]) -> None:
    seen: set[str] = set()
    for shard in found:
        if shard.path in seen:
            raise SourceError(
                f"shard {posixpath.basename(shard.path)!r}: {shard.path!r} is listed twice, so its samples would come "
                "twice in an epoch; list it once and raise the source's weight instead"
            )
        seen.add(shard.path)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a source. ``name`` is what identifies it anywhere: it never holds a machine's path."""

    name: str
    url: str
    size: int  # bytes, as stored
    digest: bytes = b""  # of the bytes ``compared``; none where they are not read at the start (``content``)
    compared: tuple[tuple[int, int], ...] = ()
    written_ns: int = 0  # when it was written last, by its file system; no part of what it is

    @property
    def is_file(self) -> bool:
        """True where it is a file that this machine opens by its path."""
        return "://" not in self.url
