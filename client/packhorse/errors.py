"""Every error that Packhorse raises, so that a caller can tell whose turn it is.

    PackhorseError
    ├── ConfigError          the configuration file or an argument is wrong: edit it
    ├── ContractError        trainer and server disagree, or the layout cannot work: turn the named knob
    │   └── HandshakeRefused the server refused this reader; ``violations`` holds all of it
    ├── SourceError          the data is wrong: a shard, a member, a sample
    ├── ProtocolError        the peer said something that the protocol does not allow
    └── TransportError       the peer cannot be reached, or is silent
        ├── AuthenticationFailed  a key is missing, unknown or another's; no retry can help
        ├── StartTimeout     no attempt formed before ``start_timeout``
        ├── StallTimeout     the loop asked and nothing came for ``stall_timeout``
        └── ServerFailed     the server reported a fatal error of its own

A message names the field, its value, the rule and the remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packhorse.rules import Violation

__all__ = [
    "AuthenticationFailed",
    "ConfigError",
    "ContractError",
    "HandshakeRefused",
    "PackhorseError",
    "ProtocolError",
    "ServerFailed",
    "SourceError",
    "StallTimeout",
    "StartTimeout",
    "TransportError",
]


class PackhorseError(Exception):
    """Base of all errors of this package."""


class ConfigError(PackhorseError, ValueError):
    """A configuration value or an argument breaks a rule."""


class ContractError(PackhorseError, ValueError):
    """The contract between trainer and server does not hold."""


class HandshakeRefused(ContractError):
    """The server refused this reader.

    ``violations`` lists every broken rule, not only the first.
    """

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("the server refused this reader:\n" + "\n".join(f"  {v}" for v in self.violations))


class SourceError(PackhorseError, ValueError):
    """A shard, a member or a sample cannot be used.

    The text starts with the place: ``shard 'docs-000.tar', member 'a.txt' at byte 512: …``.
    """


class ProtocolError(PackhorseError):
    """A message that the protocol does not allow here."""


class TransportError(PackhorseError):
    """The peer cannot be reached or does not answer."""


class AuthenticationFailed(TransportError):
    """The keys of server and client do not fit; the text says which is missing or wrong, and what to do."""


class StartTimeout(TransportError, TimeoutError):
    """No attempt formed before the deadline; the message says what was waited for."""


class StallTimeout(TransportError, TimeoutError):
    """The loop asked for a micro-batch and none came before the deadline."""


class ServerFailed(TransportError):
    """The server reported a fatal error; its message is this one's."""
