"""The status page: one file, nothing loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["page"]


@cache
def page() -> bytes:
    return files("packhorse_service.monitoring").joinpath("page.html").read_bytes()
