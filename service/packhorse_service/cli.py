"""The command line.

``packhorse serve | check | plan | inspect | prepare | tap | status | loadtest | keygen | demo``
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``packhorse`` script, which every install has: say what is missing where it is."""
    try:
        from packhorse_service.commands import app
    except ModuleNotFoundError as error:
        sys.exit(f"packhorse: the module {error.name!r} is missing; pip install 'packhorse[service]'")
    app()
