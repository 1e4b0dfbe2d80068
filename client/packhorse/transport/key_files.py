"""Key files: TOML that ``packhorse keygen`` writes. A trainer's holds all it needs, a secret among it.

CURVE, the encryption of ZeroMQ, proves each side to the other by a pair of keys. A trainer's file holds its own
pair and the server's public key; which ranks a key may claim is the server's to say. A secret is read from a file
that its owner alone can read, and from nowhere else: arguments, environments and logs hold paths.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from packhorse.errors import ConfigError

__all__ = ["KEY_FILE", "ClientKey", "find_client_key", "parse_toml", "public_key", "read_key_pair"]

KEY_FILE = "PACKHORSE_KEY_FILE"  # environment variable: the path of a trainer's key file
FILE_LIMIT_BYTES = 16 << 10
OTHERS = stat.S_IRWXG | stat.S_IRWXO
LEAST_ZEROMQ = (4, 3, 3)  # before it a client without a key could starve the others (CVE-2020-15166)
LETTERS = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # of a key: 32 bytes in Z85


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A trainer's pair of keys and its server's public key, each as ZeroMQ takes them: 40 letters of Z85."""

    path: Path
    public: bytes
    server: bytes
    secret: bytes = field(repr=False)


def find_client_key(
    key_file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> ClientKey | None:
    """Find the key in ``key_file``, else in the file that ``PACKHORSE_KEY_FILE`` names, else return ``None``.

    Raises ``ConfigError`` where that file cannot be used.
    """
    named = key_file if key_file is not None else environ.get(KEY_FILE)
    if not named:
        return None
    path = Path(named)
    public, secret, server = read_key_pair(path, "server")
    return ClientKey(path, public, server, secret)


def read_key_pair(path: Path, *further: str) -> tuple[bytes, ...]:
    """Public and secret key of a file that its owner alone can read, and further public keys by their names.

    Raises ``ConfigError`` that says what is wrong with it; a secret is in no message.
    """
    require_curve()
    found = parse_toml(_read_private(path), path)
    names = ("public", "secret", *further)
    require_fields(found, names, str(path))
    public, *others = (public_key(found[name], f"{path}: {name}") for name in ("public", *further))
    secret = _key(found["secret"])
    if secret is None or zmq.curve_public(secret) != public:
        raise ConfigError(f"{path}: secret does not belong to public={public.decode()!r}; {ANEW}")
    return public, secret, *others


def require_curve() -> None:
    """Raise ``ConfigError`` where the ZeroMQ that is installed cannot encrypt, or not safely."""
    if not zmq.has("curve") or zmq.zmq_version_info() < LEAST_ZEROMQ:
        least = ".".join(map(str, LEAST_ZEROMQ))
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} with curve={zmq.has('curve')}: keys need {least} or later, built with CURVE; "
            "install a wheel of pyzmq"
        )


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & OTHERS:
                raise ConfigError(
                    f"key file {str(path)!r} has mode {mode:04o}: others than its owner can use the secret in it; "
                    f"chmod 600 {path}, and make another key if anybody has read it"
                )
            return file.read(FILE_LIMIT_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"key file {str(path)!r} cannot be read: {error.strerror}; packhorse keygen makes it"
        ) from error
    except UnicodeDecodeError as error:
        # Not as its cause: that holds what was read.
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; {ANEW}") from None


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    """Parse TOML. Raise ``ConfigError`` with the line that is wrong."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not valid TOML: {reason}; {ANEW}") from None  # it may hold the text


def require_fields(found: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` where other fields than ``names`` are there, or one is not."""
    for name in names:
        if name not in found:
            raise ConfigError(f"{where}: {name} is missing; must have {', '.join(names)}; {ANEW}")
    for name in found:
        if name not in names:
            raise ConfigError(f"{where}: unknown field {name!r}; must have {', '.join(names)}; remove it")


def public_key(value: object, where: str) -> bytes:
    """Read a public key as it stands in a file. Raises ``ConfigError`` that begins with ``where``."""
    key = _key(value)
    if key is None:
        raise ConfigError(f"{where}={value!r} must be a key: 40 letters of Z85; {ANEW}")
    return key


def _key(value: object) -> bytes | None:
    if not isinstance(value, str) or not LETTERS.fullmatch(value):
        return None
    key = value.encode("ascii")
    try:
        z85.decode(key)
    except struct.error:  # five letters that stand for more than four bytes
        return None
    return key


ANEW = "copy it again from where it was made, or make another (packhorse keygen)"
