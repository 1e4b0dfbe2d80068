"""Real data that the repository does not hold: a folder ``shared/`` beside it, absent in most checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1].parent / "shared"


def shared(path: str) -> Path:
    """Return ``shared/PATH``, or skip the test where there is none."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"needs shared/{path} beside the repository")
    return found
