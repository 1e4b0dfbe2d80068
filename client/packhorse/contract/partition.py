"""How the rows of a contract are cut for the context-parallel ranks."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Partition"]


class Partition(StrEnum):
    """Who cuts a row for the context-parallel ranks, and how."""

    ZIGZAG = "zigzag"  # the server cuts; two chunks of each segment a rank
    CONTIGUOUS = "contiguous"  # the server cuts; one run of T / CP slots a rank
    WHOLE = "whole"  # every rank gets the row, the trainer's own step cuts it

    def granularity(self, context: int) -> int:
        """What a row's lengths must be a multiple of under ``context`` ranks."""
        if context == 1:
            return 1
        return context if self is Partition.CONTIGUOUS else 2 * context
