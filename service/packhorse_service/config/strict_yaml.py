"""YAML that has one meaning: no key twice in a mapping, of which YAML's own reader takes the last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

__all__ = ["read_yaml"]

MERGE_TAG = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """Reader of plain values, each of which stands in the text once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._merged: set[int] = set()  # keys, by identity, that came into a mapping by a merge

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping of ``node``. What it merges (``<<``) it may give anew, what it gives itself it may not."""
        self._refuse_repeated(node)
        return super().construct_mapping(node, deep)

    def _refuse_repeated(self, node: MappingNode) -> None:
        given: dict[object, Node] = {}
        # Keys of merged mappings stand in front once they are put in, and are no repetition.
        for key, _ in node.value if node.tag != MERGE_TAG else ():
            if key.tag == MERGE_TAG or not isinstance(key, ScalarNode) or id(key) in self._merged:
                continue
            name = self.construct_object(key)
            first = given.setdefault(name, key)
            if first is not key:
                lines = f"lines {first.start_mark.line + 1} and {key.start_mark.line + 1}"
                raise ConstructorError(None, None, f"{name!r} is given twice, in {lines}; keep one", key.start_mark)

    def flatten_mapping(self, node: MappingNode) -> None:
        """Put what ``node`` merges in front of its own keys."""
        own = {id(key) for key, _ in node.value}
        super().flatten_mapping(node)
        self._merged.update(id(key) for key, _ in node.value if id(key) not in own)


def read_yaml(text: str) -> Any:
    """Return the value that ``text`` holds. Raises ``yaml.YAMLError`` or ``ValueError`` that say what is wrong."""
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
