"""What every file of ``deploy/``, and of its tests, must be by its kind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, ROOT, run

YAML = sorted(DEPLOY.rglob("*.yaml"))
OWN = [Path(__file__).with_name("systemd_namespace.sh"), ROOT / ".ci" / "run", ROOT / ".ci" / "system-packages"]
SHELL = [*sorted((DEPLOY / "slurm").glob("*.s*")), *OWN]


def test_yaml_is_tidy() -> None:
    run(["yamllint", "--strict", "-c", Path(__file__).with_name("yamllint.yaml"), *YAML])


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_have_no_traps(path: Path) -> None:
    run(["shellcheck", "--external-sources", "--shell=bash", f"--source-path={path.parent}", path])


def test_the_readme_names_every_folder_and_what_it_links_is_there() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (DEPLOY / "README.md").read_text())
    for name in linked:
        assert (DEPLOY / name).exists(), name
    assert {name.partition("/")[0] for name in linked} == {path.name for path in DEPLOY.iterdir() if path.is_dir()}
