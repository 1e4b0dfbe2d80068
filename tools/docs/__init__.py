"""What the pages in ``docs/`` say of the code is written from the code, between two markers.

<!-- begin metrics: written by make docs -->
…
<!-- end metrics -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tools.docs.configuration_page import settings, trainer_facts
from tools.docs.metrics_page import metrics

__all__ = ["filled"]

BLOCKS: Mapping[str, Callable[[], str]] = {"settings": settings, "trainer": trainer_facts, "metrics": metrics}
BLOCK = re.compile(r"(<!-- begin (\w+): [^\n]* -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its blocks written anew. Raises ``KeyError`` where nothing writes one."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)
