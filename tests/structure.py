"""Measures of the source itself: folders and the arrows between them, classes, names, docstrings.

``python -m tests.structure [FOLDER …]`` prints what ``test_structure`` would refuse below these folders.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
IMPORT_ROOTS = {"packhorse": ROOT / "client", "packhorse_service": ROOT / "service"}
MODULES = [path for package, root in IMPORT_ROOTS.items() for path in sorted((root / package).rglob("*.py"))]

MODULE_LINES = 450
FUNCTION_LINES = 60
FOLDER_MODULES = 16
CLASS_METHODS = 15
CLASS_ATTRIBUTES = 12
BEHAVIOUR = 3  # methods, beside properties and constructors, from which on a class is more than a record
DOCSTRING_WORDS = 5

# What a docstring cannot open with and still be read without the name above it.
DANGLING = {
    *(
        "what",
        "whether",
        "of",
        "how",
        "where",
        "that",
        "which",
        "who",
        "whom",
        "whose",
        "when",
        "why",
        "as",
        "to",
        "in",
    ),
    *("it", "its", "they", "their", "this", "these", "those", "at", "on", "from", "is", "are", "has", "one"),
}


class Class(NamedTuple):
    """One class of a module, and what it has."""

    name: str
    methods: tuple[str, ...]
    attributes: frozenset[str]
    behaves: bool
    frozen: bool  # a value: as many attributes as it needs


def name_of(path: Path) -> str:
    """The path of a module below ``client`` or ``service``."""
    return "/".join(path.relative_to(ROOT).parts[1:])


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def dotted_name(path: Path) -> str:
    """The dotted name by which a module is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {dotted_name(path): path for path in MODULES}


def folder_of(path: Path) -> str:
    """The folder that a module belongs to; one at the root of its package stands for itself."""
    below = path.relative_to(ROOT).parts[1:]
    return "/".join(below[:-1]) if len(below) > 2 or path.name == "__init__.py" else "/".join(below)


def imported_at_once(path: Path) -> Iterator[Path]:
    """The modules of this repository that are imported when this one is, without those that wait for a call."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                target = BY_NAME.get(f"{node.module}.{alias.name}", BY_NAME.get(node.module))
                if target is not None:
                    yield target


def arrows() -> Mapping[str, set[str]]:
    """The folders that the modules of each folder import."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in MODULES:
        for target in imported_at_once(path):
            if folder_of(path) != folder_of(target):
                found[folder_of(path)].add(folder_of(target))
    return found


def cycles(edges: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of folders that import one another, directly or in a round."""
    reached = {start: _reached(start, edges) for start in edges}
    groups = {
        tuple(sorted(other for other in seen if start in reached.get(other, ())))
        for start, seen in reached.items()
        if start in seen
    }
    return sorted(groups)


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges.get(start, ()))
    while waiting:
        folder = waiting.pop()
        if folder not in seen:
            seen.add(folder)
            waiting.extend(edges.get(folder, ()))
    return seen


def classes_in(tree: ast.Module) -> list[Class]:
    """Every class at the top of a module."""
    return [_class(node) for node in tree.body if isinstance(node, ast.ClassDef)]


def _class(node: ast.ClassDef) -> Class:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    set_on_self = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and isinstance(item.value, ast.Name)
        and item.value.id == "self"
    }
    plain = [method for method in methods if not method.name.startswith("__") and not method.decorator_list]
    return Class(
        name=node.name,
        methods=tuple(method.name for method in methods if not method.name.startswith("__")),
        attributes=frozenset(fields | set_on_self),
        behaves=len(plain) >= BEHAVIOUR and not any("Protocol" in ast.unparse(base) for base in node.bases),
        frozen=any("frozen=True" in ast.unparse(item) for item in (*node.decorator_list, *node.keywords)),
    )


def documented(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, name, first line of its docstring) of whatever has one in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, node.name, text.splitlines()[0]


def hard_to_read(path: Path) -> Iterator[str]:
    """Docstrings of a module that need the name above them, or say next to nothing."""
    yield from (f"{name_of(path)}:{fault}" for fault in docstrings_hard_to_read(tree_of(path)))


def docstrings_hard_to_read(tree: ast.Module) -> Iterator[str]:
    """The same for a syntax tree: line, name and what is wrong."""
    for line, name, text in documented(tree):
        words = text.replace("`", "").split()
        if words[0].rstrip(",:;").lower() in DANGLING:
            yield f"{line} {name}: opens with {words[0]!r}: {text}"
        elif len(words) < DOCSTRING_WORDS:
            yield f"{line} {name}: says little: {text}"


def too_long(path: Path) -> Iterator[str]:
    """Modules and functions over their limits of lines."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MODULE_LINES:
        yield f"{name_of(path)} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{name_of(path)}:{node.lineno} {node.name} has {length} lines"


def too_large(paths: Iterable[Path]) -> Iterator[str]:
    """Classes with behaviour that have too many methods or attributes."""
    for path in paths:
        for found in classes_in(tree_of(path)):
            attributes = 0 if found.frozen else len(found.attributes)
            if found.behaves and (len(found.methods) > CLASS_METHODS or attributes > CLASS_ATTRIBUTES):
                yield f"{name_of(path)} {found.name}: {len(found.methods)} methods, {len(found.attributes)} attributes"


def crowded() -> Iterator[str]:
    """Folders with too many modules."""
    count: defaultdict[str, int] = defaultdict(int)
    for path in MODULES:
        if path.name != "__init__.py":
            count["/".join(path.relative_to(ROOT).parts[1:-1])] += 1
    yield from (f"{folder} has {modules} modules" for folder, modules in count.items() if modules > FOLDER_MODULES)


def repeated() -> Iterator[str]:
    """Names of modules and classes that stand twice in a package."""
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in MODULES:
        package = path.relative_to(ROOT).parts[1]
        if not path.stem.startswith("__"):
            places[package, path.name].append(name_of(path))
        for found in classes_in(tree_of(path)):
            places[package, found.name].append(name_of(path))
    for (_, name), where in places.items():
        if len(where) > 1:
            yield f"{name}: {', '.join(where)}"


def main(folders: list[str]) -> None:
    paths = [path for path in MODULES if not folders or any(str(path).startswith(str(ROOT / f)) for f in folders)]
    for title, lines in {
        "cycles of folders": [" - ".join(group) for group in cycles(arrows())],
        "crowded folders": list(crowded()),
        "names twice": [line for line in repeated() if not folders or any(name_of(path) in line for path in paths)],
        "large classes": list(too_large(paths)),
        "long": [line for path in paths for line in too_long(path)],
        "docstrings": [line for path in paths for line in hard_to_read(path)],
    }.items():
        sys.stdout.write("\n".join([f"\n{title}: {len(lines)}", *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
