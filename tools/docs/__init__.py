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
from tools.docs.rules_page import bridge_rules, contract_rules, declared_settings, model_families, runtime_rules

__all__ = ["filled"]

BLOCKS: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "trainer": trainer_facts,
    "metrics": metrics,
    "contract_rules": contract_rules,
    "runtime_rules": runtime_rules,
    "model_families": model_families,
    "bridge_rules": bridge_rules,
    "declared_settings": declared_settings,
}
BLOCK = re.compile(r"(<!-- begin (\w+): [^\n]* -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)


def filled(page: str) -> str:
    """A page with its blocks written anew. Raises ``KeyError`` where nothing writes one."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)
