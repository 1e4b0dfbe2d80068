"""How the rows of a contract are cut for the context-parallel ranks."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Partition"]


class Partition(StrEnum):
    """Way in which a row is cut for the context-parallel ranks, and by whom."""

    ZIGZAG = "zigzag"
    """The server cuts; each rank gets two chunks of each segment, as Transformer Engine's THD partition does."""
    CONTIGUOUS = "contiguous"
    """The server cuts; each rank gets one run of T / CP slots."""
    WHOLE = "whole"
    """Every rank gets the whole row, and the trainer's own step cuts it."""

    def granularity(self, context: int) -> int:
        """Return the number that lengths must be a multiple of to be cut for ``context`` ranks.

        They are the lengths of each segment, in slots; with ``CONTIGUOUS`` that of the row.
        """
        if context == 1:
            return 1
        return context if self is Partition.CONTIGUOUS else 2 * context
