"""Members that follow one another and share a key are one sample: webdataset's rule.

``docs/0001.txt.gz`` has the key ``docs/0001`` and the extension ``txt``, stored compressed. Keys and
extensions part at the first dot of the base name; extensions are compared in lower case; a member
without a dot belongs to no sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from packhorse.errors import SourceError
from packhorse_service.sources.tar.reader import TarMember, describe_member

__all__ = ["Sample", "group_samples"]

# webdataset.tariterators.base_plus_ext, to the letter: importing it loads torch, seconds for each worker.
MEMBER_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
GZIP_SUFFIX = ".gz"


class Sample(NamedTuple):
    """The members of one sample, by extension (without ``.gz``)."""

    key: str
    members: dict[str, TarMember]
    next_offset: int | None  # of the following sample's first header; None where the shard ends

    @property
    def first(self) -> TarMember:
        """The member that comes first in the shard."""
        return next(iter(self.members.values()))


def group_samples(members: Iterable[TarMember], *, shard: str) -> Iterator[Sample]:
    """Group the ``members`` of one shard, and yield the samples that they form.

    Raises ``SourceError`` where a sample has one extension twice, or a key comes again after another:
    its members would be taken for two samples.
    """
    seen: set[str] = set()
    key, current = "", dict[str, TarMember]()
    for member in members:
        prefix, extension = split_name(member.name)
        if not prefix:  # no dot in its name
            continue
        if prefix != key:
            if current:
                yield Sample(key, current, member.offset)
            if prefix in seen:
                raise SourceError(
                    f"{describe_member(shard, member)}: duplicate key {prefix!r}, it came earlier in this shard; the "
                    "members of a sample must follow one another (sort the files before tar), and keys must differ"
                )
            seen.add(prefix)
            key, current = prefix, {}
        if extension in current:
            raise SourceError(
                f"{describe_member(shard, member)}: duplicate key {prefix!r}, its sample already has a member "
                f"{current[extension].name!r}; keys must differ within a shard"
            )
        current[extension] = member
    if current:
        yield Sample(key, current, None)


def split_name(name: str) -> tuple[str, str]:
    """Return a member's key and its extension, lower-case and without ``.gz``; both are empty if it has no dot."""
    key, _, extension = name.partition(".")
    if not key or not extension or "/" in extension:  # no dot, a dot in a folder's name or before all others
        match = MEMBER_NAME.match(name)
        if match is None:
            return "", ""
        key, extension = match[1], match[2]
    return key, extension.lower().removesuffix(GZIP_SUFFIX)
