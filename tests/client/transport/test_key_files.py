"""A trainer's key file: found by argument or environment, and refused in words where it cannot be trusted."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from packhorse import ConfigError, Feed
from packhorse.transport.key_files import KEY_FILE, find_client_key
from tests.keys_on_disk import make_keys, secrets_in


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys") / "trainers.key"


def test_the_argument_wins_over_the_environment_and_without_either_there_is_no_key(key_file: Path) -> None:
    assert find_client_key(None, {}) is None
    assert find_client_key(None, {KEY_FILE: ""}) is None
    by_environment = find_client_key(None, {KEY_FILE: str(key_file)})
    by_argument = find_client_key(str(key_file), {KEY_FILE: "elsewhere"})
    assert by_environment is not None
    assert by_environment == by_argument
    assert by_environment.path == key_file


def test_a_key_is_shown_without_its_secret(key_file: Path) -> None:
    key = find_client_key(key_file)
    assert key is not None
    assert key.public.decode() in repr(key)
    assert key.secret.decode() in secrets_in(key_file.parent)
    assert key.secret.decode() not in f"{key!r} {key}"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o644])
def test_a_secret_that_others_can_use_is_refused_with_the_command_that_mends_it(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(f"has mode {mode:04o}: ") + f".*chmod 600 {key_file}"):
        find_client_key(key_file)


def test_a_secret_that_nobody_may_write_is_fine(key_file: Path) -> None:
    key_file.chmod(0o400)
    assert find_client_key(key_file) is not None


def replaced(name: str, value: str) -> Callable[[str], str]:
    """The line of ``name`` says ``value`` instead."""
    return lambda text: re.sub(rf"^{name} = .*$", lambda _: value, text, flags=re.MULTILINE)


OTHER = zmq.curve_keypair()[0].decode()

DAMAGED: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "public is missing; must have public, secret, server"),
    "cut off": (lambda text: text[: text.index("server =") - 3], r"not valid TOML: .*at line 3|at end of document"),
    "no server": (replaced("server", ""), "server is missing"),
    "an unknown field": (lambda text: text + "\nmode = 1", "unknown field 'mode'"),
    "a short key": (replaced("server", 'server = "abc"'), "server='abc' must be a key: 40 letters of Z85"),
    "a wrong letter": (replaced("server", f'server = "{OTHER[:-1]}~"'), "server=.* must be a key"),
    "no text": (replaced("public", "public = 7"), "public=7 must be a key"),
    "more than 32 bytes": (replaced("server", f'server = "{"#" * 40}"'), "server=.* must be a key"),
    "another's public key": (replaced("public", f'public = "{OTHER}"'), "secret does not belong to public="),
    "a short secret": (replaced("secret", 'secret = "abc"'), "secret does not belong to public="),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_by_field_or_line_and_its_secret_is_not_shown(
    key_file: Path, damage: Callable[[str], str], words: str
) -> None:
    text = key_file.read_text()
    key_file.write_text(damage(text))
    with pytest.raises(ConfigError, match=words) as refused:
        find_client_key(key_file)
    assert str(key_file) in str(refused.value)
    assert tomllib.loads(text)["secret"] not in str(refused.value)
    assert refused.value.__cause__ is None, "an error of the parser holds what it parsed"


def test_a_file_of_other_bytes_and_one_that_is_missing_are_refused(key_file: Path) -> None:
    key_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        find_client_key(key_file)
    with pytest.raises(ConfigError, match=r"'/nowhere/a\.key' cannot be read: No such file"):
        find_client_key("/nowhere/a.key")


def test_a_feed_with_a_key_that_cannot_be_used_is_not_made(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file.chmod(0o644)
    monkeypatch.setenv(KEY_FILE, str(key_file))
    with pytest.raises(ConfigError, match="chmod 600"):
        Feed("tcp://127.0.0.1:1")
