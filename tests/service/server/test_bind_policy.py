"""Where a server may listen without keys; decided on the text, nothing is bound to a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse import ConfigError
from packhorse_service.check.checks import check_access
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.server.bind_policy import is_private, require_private
from packhorse_service.server.router import Router

PRIVATE = [
    "tcp://127.0.0.1:5555",
    "tcp://127.0.0.1:*",
    "tcp://127.8.9.10:1",
    "tcp://[::1]:5555",
    "tcp://localhost:5555",
    "ipc:///run/user/1000/packhorse",
    "ipc://socket",
    "ipc://*",
]
OPEN = [
    "tcp://*:5555",
    "tcp://0.0.0.0:5555",
    "tcp://[::]:5555",
    "tcp://10.0.0.7:5555",
    "tcp://[fe80::1%eth0]:5555",
    "tcp://eth0:5555",
    "tcp://lo:5555",  # a name may stand for any address
    "tcp://trainer-0.cluster:5555",
    "tcp://127.0.0.1:1;0.0.0.0:5555",  # ZeroMQ binds what is behind the semicolon
    "tcp://localhost.evil.example:5555",
    "tcp://127.0.0.1.nip.io:5555",
    "ipc://@abstract",  # has no file, and so no owner
]


@pytest.mark.parametrize("listen", PRIVATE)
def test_loopback_and_files_need_no_keys(listen: str) -> None:
    assert is_private(listen)
    require_private(listen, curve=False, insecure=False)


@pytest.mark.parametrize("listen", OPEN)
def test_everything_else_is_refused_without_keys_unless_asked_for(listen: str) -> None:
    assert not is_private(listen)
    with pytest.raises(ConfigError, match=r"listen=.*make keys .*--insecure"):
        require_private(listen, curve=False, insecure=False)
    require_private(listen, curve=True, insecure=False)
    require_private(listen, curve=False, insecure=True)


@pytest.mark.parametrize("listen", ["", "127.0.0.1:5555", "udp://127.0.0.1:1", "inproc://a", "TCP://127.0.0.1:1"])
def test_other_transports_are_refused_by_name_even_with_keys(listen: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://address:port or ipc://path"):
        require_private(listen, curve=True, insecure=True)


def test_a_socket_is_its_owners_alone_and_not_in_a_folder_of_everybodys(tmp_path: Path) -> None:
    router = Router(f"ipc://{tmp_path}/socket")
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
    router.close()
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"chmod 700 {tmp_path}"):
        Router(f"ipc://{tmp_path}/socket")
    tmp_path.chmod(0o1777)  # as /tmp is: nobody can replace what is another's
    Router(f"ipc://{tmp_path}/socket").close()
    with pytest.raises(ConfigError, match="its folder cannot be used: No such file"):
        Router(f"ipc://{tmp_path}/missing/socket")


def test_no_server_binds_elsewhere_whoever_makes_it() -> None:
    with pytest.raises(ConfigError, match="is not this machine's loopback"):
        Router("tcp://0.0.0.0:*")


def test_a_check_says_the_same_and_knows_what_it_will_be_served_with(tmp_path: Path) -> None:
    config = ServeConfig.model_validate({"listen": "tcp://*:5555", "sources": {"docs": {"shards": "a.tar"}}})
    with pytest.raises(ConfigError, match="is not this machine's loopback"):
        check_access(config, tmp_path)
    check_access(config, tmp_path, insecure=True)
