"""Extension of griffe, which reads the code for the site: a field made by ``documented`` has its description there.

Without it the reference would hide such fields, which have no docstring, and show the call in place of the default.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe

__all__ = ["DescribedFields"]

MAKER = "documented"


class DescribedFields(griffe.Extension):  # type: ignore[misc]  # griffe is untyped here
    """Reading of ``name: type = documented("description", default)``."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_kwargs: Any) -> None:
        """Give an attribute the description and the default that the call names."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != MAKER:
            return
        description, *default = call.arguments
        attr.docstring = griffe.Docstring(ast.literal_eval(str(description)), parent=attr)
        attr.value = default[0] if default else "None"
