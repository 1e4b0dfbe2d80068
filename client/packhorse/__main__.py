"""``python -m packhorse`` is the ``packhorse`` command, which comes with the service."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    try:
        command_line = import_module("packhorse_service.cli")
    except ModuleNotFoundError as error:
        sys.exit(f"packhorse: the module {error.name!r} is missing; pip install 'packhorse[service]'")
    command_line.main()
