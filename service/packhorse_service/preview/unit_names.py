"""Words that the tables and pictures share."""

from __future__ import annotations

from packhorse.contract.batch_contract import Packing

__all__ = ["short_name", "unit_of"]

NAME_LENGTH = 30


def unit_of(packing: str, rows: int) -> str:
    """Return what a micro-batch of so many rows is called: a pack, where it is one."""
    return "pack" if packing in (Packing.ONLINE, Packing.CONCAT) and rows == 1 else "micro-batch"


def short_name(name: str) -> str:
    """Return a name with its middle left out where it is long: both ends tell sources apart."""
    if len(name) <= NAME_LENGTH:
        return name
    half = (NAME_LENGTH - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
