"""A forward reader of tar shards that can start at any member.

``tarfile`` must walk a stream from its first byte and makes an object per member, which costs more than
all the rest of loading. This reader parses headers by hand and agrees with ``tarfile`` (and so with
``webdataset``) on which members there are, with differences that are all refusals: it raises where
``tarfile`` silently stops, at garbage after the first member and at whatever stands behind the end of the archive,
and it refuses links, sparse files and global headers that rename or resize what follows, since a reader that starts
behind them could not know.

The format: a member is a 512-byte header and its data, padded to 512 bytes. A PAX (``x``, ``g``) or GNU
(``L``, ``K``) header is such a member too; its data describes the one after it. Zeros end the archive.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, cast

from packhorse.errors import SourceError

__all__ = ["TarMember", "describe_member", "read_members"]

BLOCK = 512  # bytes
ZEROS = bytes(BLOCK)
PADDING_BYTES = 64 * 1024  # at a time, behind the end
READ_LIMIT_BYTES = 16 * 1024 * 1024  # a size in a header is a claim: memory is taken as data really comes

NAME, SIZE, CHECKSUM, KIND, MAGIC, PREFIX = (
    slice(0, 100),
    slice(124, 136),
    slice(148, 156),
    156,
    slice(257, 263),
    slice(345, 500),
)
SPACES = 8 * ord(" ")  # what the checksum counts for its own field
POSIX_MAGIC = b"ustar\0"  # GNU's "ustar  " keeps times where POSIX has the prefix

OLD_REGULAR = ord("\0")
REGULAR = frozenset(b"0\x007")
DATALESS = frozenset(b"123456")  # links, devices, directories, FIFOs: tarfile reads no data for these
DIRECTORY = ord("5")
NO_FILES = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a character device",
    ord("4"): "a block device",
    ord("6"): "a FIFO",
}
PAX, PAX_GLOBAL, GNU_NAME, GNU_LINK = ord("x"), ord("g"), ord("L"), ord("K")
EXTENSIONS = frozenset(b"xXgLK")
KNOWN = REGULAR | DATALESS | EXTENSIONS
REFUSED_KINDS = {
    ord("S"): "a GNU sparse file",
    ord("V"): "a GNU volume label",
    ord("M"): "the continuation of a multi-volume archive",
    ord("D"): "a GNU directory dump",
    ord("N"): "an old GNU long name",
}

# LENGTH KEY=VALUE\n, where LENGTH counts the whole record: a value may hold anything, newlines too
PAX_RECORD = re.compile(rb"(\d{1,19}) ([^=]*)=")

GNU_SPARSE = b"GNU.sparse."
NEWLINE = ord("\n")

METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset's rule for members that are not data

GZIP_MAGIC = b"\x1f\x8b"
REFUSED_MAGIC = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}


class TarMember(NamedTuple):
    """A regular file of a tar. Offsets count bytes of the (decompressed) tar stream."""

    name: str
    data: bytes
    offset: int  # of its first header, PAX and GNU headers included
    next_offset: int  # of what follows it


class _HeaderOverrides(NamedTuple):
    """Values that PAX and GNU headers give for the member that follows them."""

    name: str | None = None
    size: int | None = None


NO_OVERRIDES = _HeaderOverrides()


def describe_member(shard: str, member: TarMember) -> str:
    """Return where ``member`` is, in words: how every error about data begins."""
    return f"shard {shard!r}, member {member.name!r} at byte {member.offset}"


def read_members(stream: BinaryIO, offset: int = 0, *, shard: str) -> Iterator[TarMember]:
    """Yield the regular members of the tar ``stream`` from ``offset`` on, which must be a member's first header.

    ``stream`` must be seekable and buffered. A stream that is gzip as a whole is decompressed; there a
    start at an offset reads and drops what lies before. Directories and webdataset's ``__name__`` members are
    skipped; links, which a reader that starts behind their target cannot follow, and devices are refused.

    Raises ``SourceError``, naming ``shard``, the member where known and the byte offset, for everything
    that is not a readable tar.
    """
    source = _TarStream(stream, offset, shard)
    first, extended = offset, NO_OVERRIDES  # of the member that is being put together
    header = source.read(BLOCK)
    while source.continues(header, first):
        kind = header[KIND]
        name = extended.name or _name(header)
        if kind == OLD_REGULAR and name.endswith("/"):
            kind = DIRECTORY  # how tars before POSIX write a directory
        size = 0 if kind in DATALESS else _size(header)
        if kind in REGULAR and extended.size is not None:
            size = extended.size
        if size is None or kind not in KNOWN:
            raise source.unusable(header, name)
        if kind in NO_FILES:
            raise source.no_file(kind, name)
        padded = size + -size % BLOCK
        body = source.read(padded + BLOCK)  # with the next header: one read for each member
        if len(body) < padded:
            raise source.cut_inside(name, padded - len(body))
        data, header = body[:size], body[padded:]
        source.position += BLOCK + padded
        if kind in EXTENSIONS:
            if kind == PAX_GLOBAL and extended is NO_OVERRIDES:
                first = source.position  # it says nothing about this member alone, which can be read without it
            extended = _extend(extended, kind, data, source)
            continue
        if kind in REGULAR and not (name.startswith("__") and METADATA.match(name)):
            yield TarMember(name, data, first, source.position)
        first, extended = source.position, NO_OVERRIDES


class _TarStream:
    """The tar stream with its place in it: reads, and words errors."""

    __slots__ = ("position", "shard", "stream")

    def __init__(self, stream: BinaryIO, offset: int, shard: str) -> None:
        self.stream = stream
        self.shard = shard
        self.position = offset  # of the header at hand
        self._find_start(offset)

    def _find_start(self, offset: int) -> None:
        """Seek ``offset`` of the tar stream, decompressing where needed.

        A valid header there means a plain tar. So only where there is none are the magic bytes at the
        front looked at, which for a remote shard would be a request more for every block.
        """
        if offset < 0 or offset % BLOCK:
            raise SourceError(f"{self._place()}: members begin at multiples of {BLOCK} bytes; the offset is wrong")
        self.stream.seek(offset)
        if _is_header(self.stream.read(BLOCK)):
            self.stream.seek(offset)
            return
        self.stream.seek(0)
        magic = self.stream.read(6)
        for signature, (compression, command) in REFUSED_MAGIC.items():
            if magic.startswith(signature):
                raise SourceError(
                    f"shard {self.shard!r}: it is compressed with {compression}, which cannot be read here; "
                    f"decompress it with {command}, or compress its members with gzip instead"
                )
        if not magic.startswith(GZIP_MAGIC):
            self.stream.seek(offset)
            return
        self.stream.seek(0)
        self.stream = cast(BinaryIO, gzip.GzipFile(fileobj=self.stream, mode="rb"))
        while offset > 0 and (skipped := len(self.read(min(offset, READ_LIMIT_BYTES)))):
            offset -= skipped

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or what is left."""
        try:
            if count <= READ_LIMIT_BYTES:
                return self.stream.read(count)
            pieces = []
            while count > 0 and (piece := self.stream.read(min(count, READ_LIMIT_BYTES))):
                pieces.append(piece)
                count -= len(piece)
            return b"".join(pieces)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            # BadGzipFile is an OSError, yet reading again cannot help.
            raise SourceError(f"{self._place()}: its gzip stream is damaged ({error}); copy the shard again") from error

    def continues(self, header: bytes, first: int) -> bool:
        """Tell whether ``header`` is one, or the archive ends cleanly. ``first`` is the pending member's offset."""
        if _is_header(header):
            return True
        if header and header != ZEROS:
            if len(header) < BLOCK:
                raise SourceError(f"{self._place()}: the shard is cut inside a header; copy it again")
            raise SourceError(
                f"{self._place()}: there is no tar header at this offset (bad checksum); the shard is damaged or "
                "not a tar, or the offset is not that of a member"
            )
        if first != self.position:
            raise SourceError(f"{self._place()}: the shard ends after an extension header; copy it again")
        self._verify_to_end()
        return False

    def _verify_to_end(self) -> None:
        """Read to the end: zeros fill an archive up, and behind a gzip stream stands its checksum, to be compared."""
        behind = self.position + BLOCK
        while rest := self.read(PADDING_BYTES):
            if rest.count(0) < len(rest):
                found = behind + len(rest) - len(rest.lstrip(ZEROS))
                raise SourceError(
                    f"shard {self.shard!r} at byte {found}: there is data behind the end of the archive, which nobody "
                    "reads; tars that were joined are a shard each, or one by tar --concatenate"
                )
            behind += len(rest)

    def cut_inside(self, name: str, missing: int) -> SourceError:
        return SourceError(
            f"shard {self.shard!r}, member {name!r} at byte {self.position}: the shard is cut inside this member, "
            f"{missing} bytes are missing; copy it again"
        )

    def unusable(self, header: bytes, name: str) -> SourceError:
        kind = header[KIND]
        what = REFUSED_KINDS.get(kind, f"a member of type {chr(kind)!r}")
        if kind in REGULAR | EXTENSIONS:
            what = f"a member of size {header[SIZE]!r}"
        return SourceError(
            f"shard {self.shard!r}, member {name!r} at byte {self.position}: it is {what}, which is not read here; "
            "write the shard again with plain files (webdataset's TarWriter, or tar --format=pax without --sparse)"
        )

    def no_file(self, kind: int, name: str) -> SourceError:
        return SourceError(
            f"shard {self.shard!r}, member {name!r} at byte {self.position}: it is {NO_FILES[kind]}, whose content is "
            "not here; write the shard again with the files themselves (tar --dereference --hard-dereference)"
        )

    def refuse(self, rule: str) -> SourceError:
        return SourceError(f"{self._place()}: {rule}")

    def _place(self) -> str:
        return f"shard {self.shard!r} at byte {self.position}"


def _is_header(block: bytes) -> bool:
    """Compare the checksum: the sum of all bytes, with the checksum's own field taken as eight spaces."""
    if len(block) != BLOCK:
        return False
    field = block[CHECKSUM]
    # The low half of adler32 is the byte sum plus 1, modulo 65521: summing at C's speed, exact for ASCII headers.
    total = (zlib.adler32(block) & 0xFFFF) - 1 - sum(field) + SPACES
    return field == b"%06o\0 " % total or _octal(field) in _checksums(block)


def _checksums(block: bytes) -> tuple[int, int]:
    """Return the checksum, and the one of old tars that count bytes from 128 on as negative."""
    counted = block[: CHECKSUM.start] + block[CHECKSUM.stop :]
    unsigned = sum(counted) + SPACES
    return unsigned, unsigned - 256 * sum(byte > 127 for byte in counted)


def _octal(field: bytes) -> int | None:
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        return None


def _size(header: bytes) -> int | None:
    """Return the size a header gives: octal, or GNU's big-endian binary for 8 GiB and more. None = not a size."""
    field = header[SIZE]
    size = int.from_bytes(field[1:], "big") if field[0] == 0x80 else _octal(field)
    return size if size is None or size >= 0 else None


def text_of(raw: bytes) -> str:
    """Decode names. Bytes that are not UTF-8 become ``\\xNN``, so that a key can always be printed and sent."""
    return raw.decode("utf-8", "backslashreplace")


def _text(field: bytes) -> str:
    return text_of(field.split(b"\0", 1)[0])


def _name(header: bytes) -> str:
    if header[PREFIX.start] and header[MAGIC] == POSIX_MAGIC:
        return f"{_text(header[PREFIX])}/{_text(header[NAME])}"
    return _text(header[NAME])


def _extend(extended: _HeaderOverrides, kind: int, data: bytes, source: _TarStream) -> _HeaderOverrides:
    if kind == GNU_NAME:
        return extended._replace(name=_text(data))
    if kind == GNU_LINK:
        return extended
    records = pax_records(data)
    if records is None:
        raise source.refuse("the PAX header before this byte is malformed; write the shard again")
    if any(key.startswith(GNU_SPARSE) for key in records):
        raise source.refuse("the member is a GNU sparse file, which is not read here; write the shard without --sparse")
    if kind == PAX_GLOBAL:
        if renames(records):
            raise source.refuse(
                "a global PAX header gives the path or size of all members after it, so reading cannot start behind "
                "it; write the shard again with webdataset's TarWriter"
            )
        return extended
    name, size = records.get(b"path"), records.get(b"size")
    if size is not None and (not size.isdigit() or len(size) > 20):
        raise source.refuse(f"the PAX header gives the size {size!r}, which is not a number")
    return _HeaderOverrides(
        name=extended.name if name is None else _text(name).rstrip("/"),
        size=extended.size if size is None else int(size),
    )


def pax_records(data: bytes) -> dict[bytes, bytes] | None:
    """Return what a PAX header says, by key; ``None`` if it is malformed."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:
        match = PAX_RECORD.match(data, start)
        if match is None:
            return None
        stop = start + int(match[1])
        if not match.end() < stop <= len(data) or data[stop - 1] != NEWLINE:
            return None
        records[match[2]] = data[match.end() : stop - 1]
        start = stop
    return records


def renames(records: dict[bytes, bytes]) -> bool:
    """Tell whether the member cannot be read as its own header has it."""
    return b"path" in records or b"size" in records or any(key.startswith(GNU_SPARSE) for key in records)
