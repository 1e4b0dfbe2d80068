"""What the files of ``deploy/`` tell ``packhorse`` to do, it can: every command and every option is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from packhorse_service.commands import app
from tests.deploy.kustomize import render
from tests.deploy.tools import DEPLOY

WORDS = re.compile(r"packhorse (\w+)((?: +\\?\n? *(?:'[^']*'|\"[^\"]*\"|[^\s#|;&`]+))*)")


def text_files() -> list[Path]:
    kinds = {".sh", ".sbatch", ".service", ".yaml", ".py", ".md", ".json"}
    return [path for path in sorted(DEPLOY.rglob("*")) if path.suffix in kinds or path.name == "Dockerfile"]


def written() -> Iterator[tuple[str, str]]:
    """(command, its arguments) wherever a line says ``packhorse …``."""
    names = {command.name or "" for command in app.registered_commands}
    known = names | {str(getattr(command.callback, "__name__", "")) for command in app.registered_commands}
    for path in text_files():
        for name, arguments in WORDS.findall(path.read_text()):
            if name in known:
                yield name, arguments


def listed() -> Iterator[tuple[str, str]]:
    """(command, its arguments) of containers, whose images run ``packhorse``."""
    for folder in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        for resource in render(folder.parent):
            pod = resource.get("spec", {}).get("template", {}).get("spec", {})
            yield from _of_images([*pod.get("initContainers", ()), *pod.get("containers", ())], "args")
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    yield from _of_images(list(compose["services"].values()), "command")


def _of_images(containers: list[dict[str, Any]], key: str) -> Iterator[tuple[str, str]]:
    for container in containers:
        if "/packhorse:" in f"/{container['image']}" and container.get(key, [""])[0] == "serve":
            yield "serve", " ".join(container[key][1:])


@pytest.mark.parametrize(("command", "arguments"), sorted({*written(), *listed()}))
def test_a_command_exists_with_its_options(command: str, arguments: str) -> None:
    described = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [command, "--help"])
    assert described.exit_code == 0, described.output
    for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments):
        assert re.search(rf"{option}\s", described.stdout), f"packhorse {command} {arguments}"


def test_commands_are_found_in_every_kind_of_file() -> None:
    commands = [arguments for command, arguments in (*written(), *listed()) if command == "serve"]
    for part in ("%t/packhorse/server.key", "0.0.0.0:9555", "$RUN/endpoint", "feed.yaml"):
        assert [arguments for arguments in commands if part in arguments], part
