"""What the pages in ``docs/`` say of the code is written from the code, between two markers.

<!-- begin metrics: written by make docs -->
…
<!-- end metrics -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.docs.configuration_page import settings, trainer_facts
from tools.docs.metrics_page import metrics
from tools.docs.protocol_page import MESSAGE_TABLES
from tools.docs.rules_page import (
    bridge_rules,
    contract_rules,
    declared_settings,
    model_families,
    runtime_rules,
    transformers_families,
)
from tools.docs.state_tables import client_picture, client_states, server_picture, server_states

__all__ = ["PICTURES", "filled"]

ROOT = Path(__file__).parents[2]

BLOCKS: Mapping[str, Callable[[], str]] = {
    "settings": settings,
    "trainer": trainer_facts,
    "metrics": metrics,
    "contract_rules": contract_rules,
    "runtime_rules": runtime_rules,
    "model_families": model_families,
    "transformers_families": transformers_families,
    "bridge_rules": bridge_rules,
    "declared_settings": declared_settings,
    "client_states": client_states,
    "server_states": server_states,
    **MESSAGE_TABLES,
}
# Modules whose docstring has a picture that is drawn from their table.
PICTURES: Mapping[Path, Callable[[], str]] = {
    ROOT / "client" / "packhorse" / "protocol" / "client_session.py": client_picture,
    ROOT / "service" / "packhorse_service" / "protocol" / "stream_session.py": server_picture,
}
BLOCK = re.compile(r"(<!-- begin (\w+): [^\n]* -->\n).*?(<!-- end \2 -->\n)", re.DOTALL)


def filled(page: str) -> str:
    """Write the blocks of a page anew. Raises ``KeyError`` where nothing writes one."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)
