"""Content of a sample's members, whatever container they lie in, and the error where it cannot be used."""

from __future__ import annotations

import gzip
import zlib

from packhorse.errors import SourceError
from packhorse_service.sources.tar.grouping import GZIP_SUFFIX
from packhorse_service.sources.tar.reader import TarMember

__all__ = ["BadSample", "content_of"]


class BadSample(SourceError):
    """Error of one sample, whose content cannot be used; the loader records it as a fault and goes on.

    ``member`` is the one at fault, ``None`` where it is the sample as a whole.
    """

    def __init__(self, reason: str, member: TarMember | None = None) -> None:
        self.member = member
        super().__init__(reason)


def content_of(member: TarMember) -> bytes:
    """Return a member's data, decompressed where its name ends in ``.gz``. Raises ``BadSample`` if damaged."""
    if member.name[-3:].lower() != GZIP_SUFFIX:
        return member.data
    try:
        return gzip.decompress(member.data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadSample(
            f"its name ends in .gz but it is not a whole gzip file ({error}); write it again", member
        ) from error
