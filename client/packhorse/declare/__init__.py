"""Declaring the contract without typing it twice: from the settings that a trainer has already.

These functions are reached through ``BatchContract.from_megatron``, ``.from_megatron_bridge``,
``ParallelLayout.from_megatron``, ``.from_megatron_bridge``, ``.from_device_mesh`` and ``.from_environment``.
They read by attribute and import no stack; what a setting leaves open is not declared. ``settings`` lists
what is read, field by field, and ``docs/rules.md`` shows it.

``check_bridge(cfg)`` checks a Megatron-Bridge configuration before it is launched.
"""

from packhorse.declare.bridge import (
    bridge_rule_input,
    check_bridge,
    contract_from_megatron_bridge,
    layout_from_megatron_bridge,
)
from packhorse.declare.bridge_rules import BRIDGE_RULES
from packhorse.declare.megatron import contract_from_megatron, layout_from_megatron
from packhorse.declare.meshes import layout_from_device_mesh, layout_from_environment

__all__ = [
    "BRIDGE_RULES",
    "bridge_rule_input",
    "check_bridge",
    "contract_from_megatron",
    "contract_from_megatron_bridge",
    "layout_from_device_mesh",
    "layout_from_environment",
    "layout_from_megatron",
    "layout_from_megatron_bridge",
]
