"""The image as far as it can be seen without an engine to build it: its lint, what goes into it, and how it starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import DEPLOY, ROOT, run

DOCKER = DEPLOY / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
IGNORED = (DOCKER / "Dockerfile.dockerignore").read_text().split("\n")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*(?:\\\n.*)*)", DOCKERFILE, re.MULTILINE)


def copied() -> list[str]:
    """What comes from the repository."""
    words = (line.split() for line in instructions("COPY") if not line.startswith("--from"))
    return [source for (*sources, _) in words for source in sources]


def compose() -> dict[str, Any]:
    described: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return described


def test_hadolint_has_nothing_to_say() -> None:
    assert run(["hadolint", DOCKER / "Dockerfile"]) == ""


def test_it_runs_as_another_user_than_root_and_gets_signals_itself() -> None:
    assert instructions("USER") == ["10001:10001"]
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["packhorse"]
    assert json.loads(instructions("CMD")[0]) == ["serve", "/config/feed.yaml"]
    assert "HEALTHCHECK" in DOCKERFILE


def test_only_what_is_copied_goes_to_the_builder() -> None:
    let_through = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert "*" in IGNORED
    assert let_through == set(copied())


def test_the_package_installs_from_what_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for name in copied():
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source], timeout_s=110)
    (wheel,) = tmp_path.glob("packhorse-*.whl")
    listed = run([sys.executable, "-m", "zipfile", "--list", wheel])
    for part in (
        "packhorse_service/commands/__init__.py",
        "packhorse_service/sources/chatml.jinja",
        "entry_points.txt",
    ):
        assert part in listed


@pytest.mark.parametrize("name", compose()["services"])
def test_a_service_is_confined_and_published_on_loopback_alone(name: str) -> None:
    service = compose()["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert ":" in service["image"], "an image has a version"


def test_what_compose_mounts_and_builds_is_there() -> None:
    services = compose()["services"]
    assert (DOCKER / services["packhorse"]["build"]["context"] / services["packhorse"]["build"]["dockerfile"]).exists()
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    for path in (DOCKER / source for source in mounted if source.startswith("../")):
        assert path.exists(), path
