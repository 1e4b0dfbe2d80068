"""JSON that has one meaning: no name twice in an object, no NaN and no Infinity, which Python's reader lets pass."""

from __future__ import annotations

import json
import math
import re
from typing import Any

__all__ = ["read_json"]

BYTE_ORDER_MARK = "\ufeff"
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]', re.DOTALL)


class _RepeatedName(ValueError):
    """Error of an object that gives a name twice."""


def read_json(text: str) -> Any:
    """Return the value that ``text`` holds. Raises ``ValueError`` that says what is wrong with it, and where."""
    if text.startswith(BYTE_ORDER_MARK):
        raise ValueError("it is not JSON: it begins with a byte order mark; save it as UTF-8 without one")
    try:
        return DECODER.decode(text)
    except _RepeatedName as error:
        raise ValueError(_describe_repeated(text, str(error))) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedName(next(name for name in names if names.count(name) > 1))
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is beyond what a float holds")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant)


def _describe_repeated(text: str, name: str) -> str:
    """Find both places of a name that some object of ``text`` gives twice."""
    objects: list[dict[str, int]] = []
    string, start = "", 0
    for token in TOKEN.finditer(text):
        match token[0]:
            case "{" | "[":
                objects.append({})
            case "}" | "]":
                objects.pop()
            case ":":
                first = objects[-1].setdefault(string, start)
                if first != start:
                    return f"it gives {name!r} twice, at {_place(text, first)} and {_place(text, start)}; keep one"
            case ",":
                continue
            case quoted:
                string, start = json.loads(quoted, strict=False), token.start()
    raise AssertionError(f"{name!r} is given twice")


def _place(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset)
    return f"line {line + 1} column {offset - text.rfind(chr(10), 0, offset)}"
