"""The place of a process in its job, and the folder for sockets: only what one node and one user have is used."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from packhorse.errors import ConfigError
from packhorse.launching.job_place import job_place
from packhorse.launching.runtime_folder import remove_abandoned, runtime_folder

FEED = Path("/data/feed.yaml")
TORCHRUN = {
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def rank(number: int, **other: str) -> dict[str, str]:
    return {**TORCHRUN, "RANK": str(number), "LOCAL_RANK": str(number), **other}


def test_one_process_starts_a_server_of_its_own_each_time() -> None:
    first, second = job_place(FEED, {}), job_place(FEED, {})
    assert first.starts
    assert second.starts
    assert first.ranks == 1
    assert first.socket != second.socket


def test_all_ranks_of_one_start_of_a_job_find_the_one_server() -> None:
    places = [job_place(FEED, rank(number)) for number in range(4)]
    assert [place.starts for place in places] == [True, False, False, False]
    assert len({place.socket for place in places}) == 1


@pytest.mark.parametrize(
    "other", [{"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "7"}, {"TORCHELASTIC_RESTART_COUNT": "1"}]
)
def test_another_start_of_a_job_has_another_server(other: dict[str, str]) -> None:
    assert job_place(FEED, rank(1)).socket != job_place(FEED, rank(1, **other)).socket


def test_another_feed_of_the_job_has_another_server() -> None:
    assert job_place(FEED, rank(1)).socket != job_place(FEED.with_name("other.yaml"), rank(1)).socket


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(rank(0, WORLD_SIZE="8"), id="more nodes"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, id="Slurm without torchrun"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "4"}, id="a launcher that names no start"),
    ],
)
def test_a_job_whose_ranks_may_be_elsewhere_is_refused_with_the_way_out(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"of one node|on one node.*packhorse serve.*packhorse\.Feed"):
        job_place(FEED, environ)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's, wherever the tests' own folders are."""
    with tempfile.TemporaryDirectory(prefix="ph-", dir="/tmp") as folder:
        yield Path(folder)


def test_the_folder_is_this_users_alone(base: Path) -> None:
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(base)})
    assert folder.parent == base
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user may use"):
        runtime_folder({"XDG_RUNTIME_DIR": str(base)})


def test_a_link_in_the_place_of_the_folder_is_refused(base: Path) -> None:
    folder = runtime_folder({"XDG_RUNTIME_DIR": str(base)})
    folder.rename(base / "elsewhere")
    folder.symlink_to(base / "elsewhere")
    with pytest.raises(ConfigError, match="only this user may use"):
        runtime_folder({"XDG_RUNTIME_DIR": str(base)})


def test_a_path_too_long_for_a_socket_is_refused(base: Path) -> None:
    deep = base / ("x" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="shorter"):
        runtime_folder({"XDG_RUNTIME_DIR": str(deep)})


def test_only_sockets_that_nobody_listens_on_are_removed(tmp_path: Path) -> None:
    def listening(name: str) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / name))
        server.listen()
        return server

    listening("abandoned.sock").close()
    with listening("live.sock"):
        remove_abandoned(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["live.sock"]
