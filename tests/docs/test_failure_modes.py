"""What the page of failures says that one sees is what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from packhorse.rules import RUNTIME_RULES, Severity
from packhorse_service.protocol.diagnosis import Cause
from tests.docs.pages import ROOT, rows, text_of

ANYTHING = "…"  # in the page, and here for what is put into a message
QUOTED = re.compile(r"`([^`]+)`")
HEADINGS = (
    "## The server does not start",
    "## A rank does not get its first micro-batch",
    "## While it trains",
    "## Going on from a checkpoint",
    "## At the end",
)
STALLS = "## A stall"
RULES = "### Rules of a refusal"


def texts(node: ast.AST) -> Iterator[str]:
    """Every text in a module, with ``ANYTHING`` where something is put into it."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in inner.values)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


@cache
def modules() -> list[ast.Module]:
    paths = [*(ROOT / "client").rglob("*.py"), *(ROOT / "service").rglob("*.py")]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@cache
def source() -> str:
    return "\n".join(text for module in modules() for text in texts(module))


def says(message: str) -> bool:
    """Whether a line of the code's reads like this."""
    return re.search("[^\n]*".join(map(re.escape, message.split(ANYTHING))), source()) is not None


def messages() -> list[str]:
    page = text_of("failure-modes.md")
    seen = [row[0] for heading in HEADINGS for row in rows(page, heading)] + [row[1] for row in rows(page, STALLS)]
    quoted = (text for cell in seen for text in QUOTED.findall(cell))
    return [text for text in quoted if " " in text]  # a word alone is a name


@pytest.mark.parametrize("message", messages())
def test_a_message_is_the_codes(message: str) -> None:
    assert says(message)


def test_a_message_that_nobody_says_would_be_noticed() -> None:
    assert not says("the moon is out of … rabbits")


def test_every_cause_of_a_stall_is_there_and_no_other() -> None:
    assert {row[0].strip("`") for row in rows(text_of("failure-modes.md"), STALLS)} == set(Cause)


def test_every_rule_by_which_only_a_running_server_rejects_is_there_and_no_other() -> None:
    calls = (ast.unparse(node.func) for module in modules() for node in ast.walk(module) if isinstance(node, ast.Call))
    sent = {call.removesuffix(".violation") for call in calls if call.endswith(".violation")}
    rejecting = {rule.id for rule in RUNTIME_RULES if rule.id in sent and rule.severity is Severity.ERROR}
    assert {row[0].split("`")[1] for row in rows(text_of("failure-modes.md"), RULES)} == rejecting
