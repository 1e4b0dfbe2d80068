"""Versions of the trainers' stacks that rules were held against: their own code was executed or read.

A rule about another version is as likely to be right as that version is like these.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["StackVersions"]


class StackVersions(StrEnum):
    """Versions of one stack. Commits are named with their date."""

    BRIDGE = "Megatron-Bridge 0.6.2 and main 067f987d (2026-08-22)"
    BRIDGE_MAIN = "Megatron-Bridge main 067f987d (2026-08-22)"  # no release has what the rule is about
    MEGATRON = "Megatron-Core 0.19.2 and Megatron-LM main d98e8a64 (2026-08-22)"
    TRANSFORMER_ENGINE = "Transformer Engine main d0067d0d (2026-08-22)"
    TORCHTITAN = "torchtitan main b5bcd76c (2026-08-21)"
    TRANSFORMERS = "Transformers 5.24.0"
