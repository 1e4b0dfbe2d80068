"""What every file of ``deploy/`` must be, by its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, run

YAML = sorted(DEPLOY.rglob("*.yaml"))
SHELL = sorted((DEPLOY / "slurm").rglob("*.s*"))


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def test_yaml_is_tidy() -> None:
    run(["yamllint", "--strict", "-c", Path(__file__).with_name("yamllint.yaml"), *YAML])


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_shell_scripts_have_no_traps(path: Path) -> None:
    run(["shellcheck", "--external-sources", "--shell=bash", f"--source-path={path.parent}", path])
