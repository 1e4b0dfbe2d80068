"""What ``packhorse keygen`` writes, who may claim which rank, and lists of clients that are refused."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from packhorse import ConfigError, ParallelLayout, TransportError
from packhorse.contract.batch_contract import ReaderPolicy
from packhorse.transport.key_files import find_client_key
from packhorse_service.commands import app
from packhorse_service.config.serve_config import CurveConfig
from packhorse_service.server.authentication import ClientAuthenticator, Ranks, load_clients, load_curve
from packhorse_service.server.key_generation import make_client, make_server
from packhorse_service.server.router import Router
from tests.keys_on_disk import CURVE, make_keys, secrets_in


def keygen(*arguments: str) -> str:
    """What it printed, on one line."""
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["keygen", *arguments])
    assert done.exit_code in (0, 1), done.output
    return " ".join(done.output.split())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# keygen ----------------------------------------------------------------------------------------------


def test_one_command_makes_all_that_a_server_and_its_trainers_need_and_says_where_it_goes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    printed = keygen(str(keys))
    assert f"curve: {{key_file: {keys}/server.key, clients: {keys}/clients.toml}}" in printed
    assert f"PACKHORSE_KEY_FILE={keys}/trainers.key" in printed
    curve = load_curve(CurveConfig(**CURVE), tmp_path)
    key = find_client_key(keys / "trainers.key")
    assert key is not None
    assert key.server == curve.public
    assert str(curve.clients.by_key[key.public].ranks) == "all ranks"
    assert all(secret not in printed for secret in secrets_in(keys))


def test_secrets_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert mode_of(keys) == 0o700
    assert {path.name: mode_of(path) for path in keys.glob("*.key")} == {"server.key": 0o600, "trainers.key": 0o600}


def test_a_further_client_is_added_to_the_list_and_changes_no_other_file(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    before = {path.name: path.read_text() for path in keys.iterdir()}
    keygen(str(keys), "--client", "debugging", "--ranks", "0, 8-15")
    after = {path.name: path.read_text() for path in keys.iterdir()}
    assert after.keys() - before.keys() == {"debugging.key"}
    assert after["clients.toml"].startswith(before["clients.toml"])
    assert {name: after[name] for name in ("server.key", "trainers.key")} == {
        name: before[name] for name in ("server.key", "trainers.key")
    }
    names = {client.name: str(client.ranks) for client in load_clients(keys / "clients.toml").by_key.values()}
    assert names == {"trainers": "all ranks", "debugging": "ranks 0, 8-15"}


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    before = {path.name: path.read_text() for path in keys.iterdir()}
    assert "server.key is there already" in keygen(str(keys))
    assert "trainers is there already" in keygen(str(keys), "--client", "trainers")
    (keys / "left.key").touch()
    assert "left.key is there already, and is never overwritten" in keygen(str(keys), "--client", "left")
    assert {path.name: path.read_text() for path in keys.iterdir() if path.name != "left.key"} == before


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    assert "there is no" in keygen(str(keys), "--client", "trainers")
    assert not keys.exists()
    make_server(keys)
    for name in ("server", "../trainers", "", "a.b", "x" * 65):
        with pytest.raises(ConfigError, match="--client="):
            make_client(keys, name, "all")
    with pytest.raises(ConfigError, match="--ranks='7-0' must be 'all', or ranks"):
        make_client(keys, "trainers", "7-0")
    assert [path.name for path in keys.iterdir()] == ["server.key"]


def test_a_folder_where_others_could_put_keys_of_theirs_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    keys.chmod(0o777)
    assert f"has mode 0777: others could put keys of theirs there; chmod 700 {keys}" in keygen(str(keys))
    assert not list(keys.iterdir())


def test_the_last_client_can_be_locked_out_and_another_added(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    (keys / "clients.toml").write_text("")
    make_client(keys, "others", "all")
    assert [client.name for client in load_clients(keys / "clients.toml").by_key.values()] == ["others"]


# Ranks -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 50)), min_size=1, max_size=6))
def test_ranks_are_what_their_text_says(spans: list[tuple[int, int]]) -> None:
    text = ", ".join(f"{low}-{low + more}" if more else str(low) for low, more in spans)
    named = {rank for low, more in spans for rank in range(low, low + more + 1)}
    ranks = Ranks.parse(text, "ranks")
    assert {rank for rank in range(-1, 2100) if rank in ranks} == named
    assert all(rank in Ranks.parse("all", "ranks") for rank in named)


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-2", "1,,2", "1;2", "1-2-3", "all, 1", "\u0661", "9" * 12, 7, None, ["0"]]
)
def test_ranks_that_say_nothing_clear_are_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"ranks={text!r} must be 'all', or ranks")):
        Ranks.parse(text, "ranks")


# The list --------------------------------------------------------------------------------------------

A, B = (zmq.curve_keypair()[0].decode() for _ in range(2))
BAD_LISTS = {
    "not TOML": ("[trainers\n", r"not valid TOML: .*line 1"),
    "no section": ('public = "x"', r"public='x' must be a section \[public\]"),
    "no ranks": (f'[a]\npublic = "{A}"', "a: ranks is missing"),
    "an unknown field": (f'[a]\npublic = "{A}"\nranks = "all"\nhost = "x"', "a: unknown field 'host'"),
    "no key": ('[a]\npublic = "x"\nranks = "all"', "a.public='x' must be a key"),
    "no such ranks": (f'[a]\npublic = "{A}"\nranks = "some"', "a.ranks='some' must be 'all'"),
    "one key twice": (
        f'[a]\npublic = "{A}"\nranks = "0"\n[b]\npublic = "{A}"\nranks = "1"',
        "b.public is the key of a",
    ),
}


@pytest.mark.parametrize(("text", "words"), BAD_LISTS.values(), ids=BAD_LISTS)
def test_a_list_is_refused_by_client_and_field(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_clients(path)
    assert str(path) in str(refused.value)


def test_a_claim_is_allowed_refused_with_what_to_change_and_every_reader_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "clients.toml"
    path.write_text(f'[a]\npublic = "{A}"\nranks = "0-1"\n[b]\npublic = "{B}"\nranks = "4-7"\n')
    clients = load_clients(path)
    assert clients.claim_violation(A.encode(), 1) is None
    refused = clients.claim_violation(B.encode(), 1)
    assert refused is not None
    assert str(refused) == (
        "KEY_RANK: key is that of 'b', for ranks 4-7, must be one that may claim rank 1; "
        f"give this rank such a key, or widen ranks of [b] in {path}"
    )
    with pytest.raises(ConfigError, match="no client may claim rank 2, 3 of stream 'train'"):
        clients.require_readers(ParallelLayout(data=8), ReaderPolicy.ALL, "train")
    clients.require_readers(ParallelLayout(data=2, tensor=4), ReaderPolicy.TENSOR_ZERO, "train")


def test_an_unknown_key_is_refused_and_logged_once_and_a_flood_of_them_does_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = ClientAuthenticator(load_clients(make_keys(tmp_path / "keys") / "clients.toml"))
    assert not any(gate.callback("packhorse", A.encode()) for _ in range(3))
    assert [record.message.count(A) for record in caplog.records] == [1]
    for number in range(5000):
        assert not gate.callback("packhorse", b"%040d" % number)
    assert len(caplog.records) < 500


def test_the_servers_secret_is_in_no_description(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    curve = load_curve(CurveConfig(**CURVE), tmp_path)
    assert curve.secret.decode() not in f"{curve!r} {curve}"
    (tmp_path / "keys" / "server.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"has mode 0640: .*chmod 600"):
        load_curve(CurveConfig(**CURVE), tmp_path)


def test_a_server_whose_zap_thread_is_gone_fails_rather_than_let_clients_wait(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    router = Router(f"ipc://{tmp_path}/socket", curve=load_curve(CurveConfig(**CURVE), tmp_path))
    assert router._zap_thread is not None
    router.wait(0)
    router._zap_thread.stop()
    with pytest.raises(TransportError, match="checks the keys of clients has ended"):
        router.wait(0)
    router.close()
