"""Every page says of the code what the code is, leads where it says, and names commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from packhorse_service.commands import app
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.config.trainer_file import load_trainer
from packhorse_service.config.yaml_check import checked, load_mapping
from tests.docs.pages import PAGES, ROOT, blocks, text_of
from tools.docs import PICTURES, filled
from tools.docs.state_pictures import redrawn

AT_THE_ROOT = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
LINKING = [*sorted((ROOT / "docs").rglob("*.md")), *AT_THE_ROOT]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ |  *)packhorse (.*?)(?:\s+#.*|\s*&)?$|`packhorse (\w[^`]*)`", re.MULTILINE)


def page(path: Path) -> str:
    return path.name


def anchors(path: Path) -> set[str]:
    """What a link may lead to in a page, as GitHub names its headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_what_is_written_from_the_code_is_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert filled(text) == text, "run: make docs"


@pytest.mark.parametrize("path", PICTURES, ids=page)
def test_pictures_in_modules_are_drawn_from_their_tables(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert redrawn(source, PICTURES[path]()) == source, "run: make docs"


@pytest.mark.parametrize("path", LINKING, ids=page)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(FENCED.sub("", path.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(there), f"{target}: no such heading"


def test_the_readme_leads_to_every_page() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{path.name}" for path in PAGES} <= linked


def test_every_file_folder_and_target_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for place in re.findall(r"`((?:client|service|tests|tools|docs|deploy|\.ci)/[\w./-]*)`", text):
        assert (ROOT / place).exists(), place
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {target for command in re.findall(r"`make ([\w -]+)`", text) for target in command.split()}
    assert named <= {*targets}, named - {*targets}


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_every_command_exists_with_its_options(path: Path) -> None:
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    for shown in COMMAND.findall(text):
        name, *arguments = "".join(shown).split()
        described = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [name, "--help"])
        assert described.exit_code == 0, shown
        for option in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
            assert re.search(rf"{option}\s", described.stdout), f"{name} has no {option}"


def test_the_examples_of_the_reference_are_valid(tmp_path: Path) -> None:
    feed, trainer = (block.text for block in blocks(text_of("configuration.md")) if block.language == "yaml")
    (tmp_path / "feed.yaml").write_text(feed)
    (tmp_path / "trainer.yaml").write_text(trainer)
    assert checked(ServeConfig, load_mapping(tmp_path / "feed.yaml", "configuration"), "the page").layout.context == 2
    assert load_trainer(tmp_path / "trainer.yaml").window == 16
