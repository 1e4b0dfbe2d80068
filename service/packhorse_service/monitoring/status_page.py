"""The status page: one file with its style and its script inside, so that it needs nothing but its server.

It asks for ``status.json`` every other second and shows what is in it. Its parts are in ``page_files``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["page"]

STYLE = "page.css"
SCRIPTS = ("figures.js", "elements.js", "readers.js", "plots.js", "packs.js", "tables.js", "page.js")  # in this order


@cache
def page() -> bytes:
    """Return the page, UTF-8: the same for every server and at any time."""
    parts = files("packhorse_service.monitoring") / "page_files"
    text = {name: (parts / name).read_text(encoding="utf-8") for name in ("page.html", STYLE, *SCRIPTS)}
    script = "".join(text[name] for name in SCRIPTS)
    return text["page.html"].replace("/* style */", text[STYLE]).replace("/* script */", script).encode()
