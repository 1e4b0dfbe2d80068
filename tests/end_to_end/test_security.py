"""A server with keys, and clients with the right ones, wrong ones and none; all in processes or on real sockets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from packhorse import AuthenticationFailed, BatchContract, Feed, HandshakeRefused, ParallelLayout
from packhorse.transport.key_files import KEY_FILE
from packhorse.transport.zmtp_probe import mechanism_of
from packhorse_service.server.key_generation import make_client
from tests.harness import (
    DEADLINE_S,
    failing_server,
    read_rank,
    reading,
    running_server,
    serve_command,
    wait_until,
    write_config,
)
from tests.keys_on_disk import CURVE, make_keys, secrets_in
from tests.service.corpus import random_lengths, write_source

LIMIT_S = 5.0  # within which a client must know that its keys are wrong
CONTRACT = {"seq_length": 64, "global_batch_size": 2, "vocab_size": 10_000}
TWO = ParallelLayout(data=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With shards and keys: of ranks 0 and 1, and of all."""
    return filled(tmp_path)


def filled(folder: Path) -> Path:
    write_source(folder / "docs", random_lengths(1, 2, 40, longest=60))
    make_keys(folder / "keys", zero="0", one="1-7", trainers="all")
    return folder


def config_of(folder: Path, **settings: object) -> Path:
    defaults = {"curve": CURVE, "contract": CONTRACT, "sources": {"docs": {"shards": "docs/*.tar"}}}
    return write_config(folder, **{**defaults, **settings})


# Right keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:*", "ipc://{}/socket"], ids=["tcp", "ipc"])
def test_each_rank_reads_with_a_key_that_may_claim_it_over_an_encrypted_connection(folder: Path, listen: str) -> None:
    config = config_of(folder, listen=listen.format(folder), layout={"data": 2})
    with running_server(config) as server, ThreadPoolExecutor(2) as pool:
        assert mechanism_of(server.endpoint) == "CURVE"
        read = [
            pool.submit(read_rank, server.endpoint, TWO, rank, BatchContract(), key_file=folder / "keys" / name)
            for rank, name in enumerate(["zero.key", "one.key"])
        ]
        first, second = (future.result() for future in read)
        assert server.process.wait(DEADLINE_S) == 0
    assert len(first) == len(second) > 0


def test_a_further_stream_and_a_server_that_comes_back_are_read_with_the_same_key(folder: Path) -> None:
    settings = {
        "listen": f"ipc://{folder}/socket",
        "streams": {"validation": {"sources": {"docs": {"shards": "docs/*"}}}},
    }
    with running_server(config_of(folder, **{**settings, "curve": None})) as server:
        undisturbed = [mb.row_digest for mb in read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())]
    config = config_of(folder, **settings)
    with running_server(config) as server, reading(server.endpoint, key_file=folder / "keys" / "trainers.key") as feed:
        taken = [next(feed).row_digest for _ in range(3)]
        server.signal_and_wait(signal.SIGKILL)
        with running_server(config):
            assert [mb.row_digest for mb in feed.stream("validation")] == undisturbed
            taken += [mb.row_digest for mb in feed]
            feed.close()
    assert taken == undisturbed


def test_tap_finds_its_key_by_an_option_or_by_the_environment(folder: Path) -> None:
    keys = folder / "keys"
    with running_server(config_of(folder, layout={"data": 2})) as server, ThreadPoolExecutor(2) as pool:
        by_option = pool.submit(run_tap, server.endpoint, 0, "--key-file", str(keys / "zero.key"))
        by_environment = pool.submit(run_tap, server.endpoint, 1, environment={KEY_FILE: str(keys / "one.key")})
        for done in (by_option.result(), by_environment.result()):
            assert done.returncode == 0, done.stderr
            assert [json.loads(line)["step"] for line in done.stdout.splitlines()]


def run_tap(
    endpoint: str, rank: int, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packhorse_service", "tap", endpoint, "--rank", str(rank), "--layout", "data=2"]
    return subprocess.run(
        [*command, "--timeout", "30", *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


# Wrong keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Secured:
    """A server that waits for two ranks."""

    endpoint: str
    keys: Path
    log: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = filled(tmp_path_factory.mktemp("secured"))
    with running_server(config_of(folder, layout={"data": 2})) as server:
        yield Secured(server.endpoint, folder / "keys", folder / "server.log")


def no_key(_folder: Path, _secured: Secured) -> None:
    """Nor is one in the environment."""


def key_that_is_unknown(folder: Path, secured: Secured) -> Path:
    """Made for this server, beside another list of clients."""
    copied = folder / "keys"
    copied.mkdir(mode=0o700)
    shutil.copy(secured.keys / "server.key", copied)
    return make_client(copied, "stranger", "all")[0].path


def key_of_another_server(folder: Path, secured: Secured) -> Path:
    """The client is known here, and expects to find another server."""
    mine, other = (
        tomllib.loads((keys / "trainers.key").read_text()) for keys in (secured.keys, make_keys(folder / "k"))
    )
    path = folder / "mixed.key"
    path.touch(0o600)
    path.write_text("".join(f'{name} = "{value}"\n' for name, value in {**mine, "server": other["server"]}.items()))
    return path


WRONG: dict[str, tuple[Callable[[Path, Secured], Path | None], str]] = {
    "no key": (no_key, "this one has no key; make one"),
    "an unknown key": (key_that_is_unknown, "does not know the key of .*stranger.key.*unknown key; add it to"),
    "another server's key": (key_of_another_server, "wrong server key; if the server's key was made anew"),
}


@pytest.mark.parametrize(("find", "words"), WRONG.values(), ids=WRONG)
def test_a_client_hears_within_seconds_which_key_is_missing_or_wrong(
    secured: Secured, tmp_path: Path, find: Callable[[Path, Secured], Path | None], words: str
) -> None:
    key_file = find(tmp_path, secured)
    feed = Feed(secured.endpoint, layout=TWO, rank=0, arrays="numpy", start_timeout=LIMIT_S, key_file=key_file)
    with pytest.raises(AuthenticationFailed, match=words), feed:
        next(feed)


def test_a_key_claims_no_rank_but_its_own_and_the_refusal_names_both(secured: Secured) -> None:
    feed = Feed(
        secured.endpoint,
        layout=TWO,
        rank=1,
        contract=BatchContract(seq_length=4096),
        start_timeout=LIMIT_S,
        arrays="numpy",
        key_file=secured.keys / "zero.key",
    )
    with (
        pytest.raises(HandshakeRefused, match=r"KEY_RANK: key of rank 1 .*'zero', for ranks 0, must be") as refused,
        feed,
    ):
        next(feed)
    assert [violation.rule for violation in refused.value.violations] == ["KEY_RANK"], "nothing is said of the contract"


def test_a_refused_rank_is_named_to_the_others_at_their_deadline(secured: Secured) -> None:
    wrong = Feed(secured.endpoint, layout=TWO, rank=1, arrays="numpy", key_file=secured.keys / "zero.key")
    right = Feed(
        secured.endpoint, layout=TWO, rank=0, arrays="numpy", key_file=secured.keys / "zero.key", start_timeout=3
    )
    with pytest.raises(HandshakeRefused), wrong:
        next(wrong)
    with pytest.raises(HandshakeRefused, match="KEY_RANK: key of rank 1"), right:
        next(right)


def test_the_server_logs_whom_it_refused_once(secured: Secured) -> None:
    for _ in range(2):
        feed = Feed(secured.endpoint, layout=TWO, rank=0, arrays="numpy", key_file=secured.keys / "one.key")
        with pytest.raises(HandshakeRefused), feed:
            next(feed)
    assert secured.log.read_text().count("KEY_RANK: key of rank 0") == 1


# What never leaves -----------------------------------------------------------------------------------


def test_no_secret_is_in_the_log_at_any_level(folder: Path) -> None:
    endpoint, log = folder / "endpoint", folder / "debug.log"
    command = serve_command(config_of(folder), "--log-level", "debug", "--endpoint-file", str(endpoint))
    with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as process:
        try:
            wait_until(endpoint.exists, "the endpoint")
            where = endpoint.read_text().strip()
            assert read_rank(where, ParallelLayout(), 0, BatchContract(), key_file=folder / "keys" / "trainers.key")
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    text = log.read_text()
    assert "zmq.auth" in text, "the level is debug"
    assert not [secret for secret in secrets_in(folder / "keys") if secret in text]


# Who may reach it ------------------------------------------------------------------------------------


def test_a_server_that_others_can_reach_is_not_started_without_keys_and_check_says_the_same(folder: Path) -> None:
    config = config_of(folder, curve=None, listen="tcp://0.0.0.0:*")
    refused = failing_server(config)
    command = [sys.executable, "-m", "packhorse_service", "check", str(config)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert checked.returncode == 1
    for text in (refused, " ".join(checked.stderr.split())):
        assert "listen='tcp://0.0.0.0:*' is not this machine's loopback" in text
        assert "packhorse keygen keys/" in text
        assert "--insecure" in text


def test_a_list_of_clients_that_leaves_a_rank_out_is_refused_before_anybody_waits(folder: Path) -> None:
    make_keys(folder / "few", few="0-2, 5")
    files = {"key_file": "few/server.key", "clients": "few/clients.toml"}
    batch = {**CONTRACT, "global_batch_size": 6}
    refused = failing_server(config_of(folder, layout={"data": 6}, contract=batch, curve=files))
    assert "few/clients.toml: no client may claim rank 3, 4 of stream 'train'" in refused
