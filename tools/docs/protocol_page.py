"""The tables of messages, from their classes: a field, its type on the wire, and the comment behind it."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from packhorse.contract.batch_contract import BatchContract, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.rows.payload import ArrayEntry
from packhorse.rules import Violation
from packhorse.wire.hello import ON_THE_WIRE, Hello, SnapshotRef
from packhorse.wire.messages import TAGS, BatchBody
from tools.docs.markdown import code, table

__all__ = ["MESSAGE_TABLES"]

WORDS = {
    **{int: "integer", float: "float", str: "text", bytes: "bytes", bool: "boolean"},
    **{Position: "position", Coordinates: "coordinates", SnapshotRef: "[step, digest]", BatchBody: "body"},
    **{ParallelLayout: "layout", BatchContract: "contract", ResolvedContract: "resolved contract"},
    **{Violation: "violation", ArrayEntry: "array entry"},
}


def message_table(kind: type) -> str:
    """Return the fields of a message in their order on the wire."""
    hints, meanings = get_type_hints(kind), comments_of(kind)
    names = ON_THE_WIRE if kind is Hello else tuple(hints)
    rows = ([code(name), word_for(hints[name]), _meaning(hints[name], meanings[name])] for name in names)
    return table(("field", "type", "meaning"), rows)


def word_for(hint: Any) -> str:
    """Return the type of a field on the wire, in the words of the page."""
    if get_origin(hint) is tuple:
        return f"array of {word_for(get_args(hint)[0])}"
    return "text" if isinstance(hint, type) and issubclass(hint, StrEnum) else WORDS[hint]


def _meaning(hint: Any, comment: str) -> str:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        meanings = comments_of(hint)
        return "; ".join(f"{code(member.value)}: {meanings[member.name]}" for member in hint)
    return comment


def comments_of(kind: type) -> Mapping[str, str]:
    """Return the comment behind each field of a class, by name; empty where there is none."""
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (described,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = (node for node in described.body if isinstance(node, ast.AnnAssign | ast.Assign))
    return {_name(field): comments.get(field.end_lineno or 0, "").replace("``", "`") for field in fields}


def _name(field: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(field.target if isinstance(field, ast.AnnAssign) else field.targets[0])


MESSAGE_TABLES: Mapping[str, Callable[[], str]] = {
    **{tag: partial(message_table, kind) for tag, kind in TAGS.items()},
    "body": partial(message_table, BatchBody),
}
