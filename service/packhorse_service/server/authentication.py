"""Who may connect: the server's key, and the list of clients with the ranks that each may claim.

A *clients file* is TOML without secrets, so that it can be read, reviewed and kept with the configuration:

    [trainers]
    public = "…"
    ranks = "all"

    [debugging]
    public = "…"
    ranks = "0, 8-15"
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packhorse.contract.batch_contract import ReaderPolicy
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError
from packhorse.rules import Violation
from packhorse.rules.runtime_rules import KEY_RANK
from packhorse.transport.key_files import parse_toml, public_key, read_key_pair, require_fields
from packhorse_service.config.serve_config import CurveConfig
from packhorse_service.protocol.stream_spec import readers_of
from packhorse_service.text.formatting import names

__all__ = ["ALL", "Client", "ClientAuthenticator", "Clients", "Curve", "Ranks", "load_clients", "load_curve"]

log = logging.getLogger("packhorse.keys")

ALL = "all"
REFUSED_LIMIT = 256  # unknown keys that are logged; anybody can make more
SPAN = re.compile(r" *([0-9]{1,9}) *(?:- *([0-9]{1,9}) *)?")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of a stream's layout, some or all: ``all``, ``0-7``, ``0, 8-15``."""

    text: str
    spans: tuple[range, ...]

    @classmethod
    def parse(cls, text: object, where: str) -> Ranks:
        """Read ranks as the list of clients writes them. Raises ``ConfigError`` that begins with ``where``."""
        if text == ALL:
            return cls(ALL, ())
        spans = [SPAN.fullmatch(part) for part in text.split(",")] if isinstance(text, str) else [None]
        found = [range(int(span[1]), int(span[2] or span[1]) + 1) for span in spans if span is not None]
        if len(found) != len(spans) or not all(found):
            raise ConfigError(f"{where}={text!r} must be {ALL!r}, or ranks and spans of ranks, as in '0, 8-15'")
        return cls(str(text), tuple(found))

    def __contains__(self, rank: int) -> bool:
        return self.text == ALL or any(rank in span for span in self.spans)

    def __str__(self) -> str:
        return f"{self.text} ranks" if self.text == ALL else f"ranks {self.text}"


@dataclass(frozen=True, slots=True)
class Client:
    """Key that may connect, and the ranks that its holder may claim."""

    name: str
    public: bytes
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Clients:
    """List of the keys that may connect, by public key as ZeroMQ names it."""

    path: Path
    by_key: Mapping[bytes, Client]

    def claim_violation(self, key: bytes, rank: int) -> Violation | None:
        """Return how it breaks ``KEY_RANK`` that the holder of a key on the list claims this rank, if it may not."""
        client = self.by_key[key]
        if rank in client.ranks:
            return None
        want, got = f"one that may claim rank {rank}", f"that of {client.name!r}, for {client.ranks}"
        remedy = f"give this rank such a key, or widen ranks of [{client.name}] in {self.path}"
        return KEY_RANK.violation("key", want=want, got=got, remedy=remedy)

    def require_readers(self, layout: ParallelLayout, readers: ReaderPolicy, stream: str) -> None:
        """Raise ``ConfigError`` where no key may claim the rank of a reader: all others would wait for it in vain."""
        ranks = sorted(layout.rank(at) for at in readers_of(layout, readers))
        missing = [rank for rank in ranks if not any(rank in client.ranks for client in self.by_key.values())]
        if missing:
            raise ConfigError(
                f"{self.path}: no client may claim rank {names(missing)} of stream "
                f"{stream!r} ({layout}); widen the ranks of one, or add a key (packhorse keygen)"
            )


@dataclass(frozen=True, slots=True)
class Curve:
    """Keys of a server that encrypts (ZeroMQ's CURVE): its own pair, and the list of clients."""

    clients: Clients
    public: bytes
    secret: bytes = field(repr=False)


class ClientAuthenticator:
    """Answer to ``zmq.auth``, which asks whether a key is on the list; one that is not is logged once."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._refused: set[bytes] = set()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether this key may connect."""
        known = key in self._clients.by_key
        if not known and key not in self._refused and len(self._refused) < REFUSED_LIMIT:
            self._refused.add(key)
            names = self._clients.path
            log.warning("refused a client with the unknown key %s; %s names who may connect", key.decode(), names)
        return known


def load_curve(described: CurveConfig, base: Path) -> Curve:
    """Read the files that a configuration in ``base`` names. Raises ``ConfigError`` where one cannot be used."""
    public, secret = read_key_pair(base / described.key_file)
    return Curve(load_clients(base / described.clients), public, secret)


def load_clients(path: Path) -> Clients:
    """Read a list of clients. Raises ``ConfigError`` that names the client and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"clients file {str(path)!r} cannot be read: {reason}; packhorse keygen makes it") from error
    by_key: dict[bytes, Client] = {}
    for name, found in parse_toml(text, path).items():
        where = f"{path}: {name}"
        if not isinstance(found, dict):
            raise ConfigError(f"{where}={found!r} must be a section [{name}] with public and ranks")
        require_fields(found, ("public", "ranks"), where)
        client = Client(
            name, public_key(found["public"], f"{where}.public"), Ranks.parse(found["ranks"], f"{where}.ranks")
        )
        twin = by_key.setdefault(client.public, client)
        if twin is not client:
            raise ConfigError(f"{where}.public is the key of {twin.name} too; one section holds all ranks of a key")
    return Clients(path, by_key)
