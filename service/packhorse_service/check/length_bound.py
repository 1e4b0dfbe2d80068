"""How full packs can be at most, from the lengths of samples alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import Packing, ResolvedContract
from packhorse.errors import ConfigError
from packhorse.rounding import ceil_div, round_up

__all__ = ["Lengths", "fill_bound", "load_lengths"]

Lengths = npt.NDArray[np.int64]  # [N] slots of each sample
LONGEST = 2**31 - 1  # slots of a sample: offsets are int32; sums over samples stay within int64


def load_lengths(path: Path, *, ids: bool = False) -> Lengths:
    """Return sample lengths in slots, from a ``.npy`` file of integers. Raises ``ConfigError``.

    ``ids``: the file counts ids, of which the last is only a target.
    """
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--lengths {str(path)!r} cannot be read: {error}") from error
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
        raise ConfigError(f"--lengths {str(path)!r} must hold one row of integers, the slots of each sample")
    odd = np.flatnonzero((lengths < 0) | (lengths > LONGEST))
    if len(odd):
        raise ConfigError(
            f"--lengths {str(path)!r}: sample {odd[0]} has a length of {lengths[odd[0]]}; lengths are 0 to {LONGEST}"
        )
    slots = lengths.astype(np.int64)
    return np.maximum(slots - 1, 0) if ids else slots


def fill_bound(lengths: Lengths, contract: ResolvedContract) -> dict[str, Any]:
    """Return the best share of useful slots that any packing of these samples can reach, and why not all.

    Padding each segment to ``segment_multiple`` bounds it; without packing, each sample fills its own row.
    Samples of no slot, or of more than a row, are counted and left out.
    """
    usable = lengths[(lengths > 0) & (lengths <= contract.seq_length)]
    useful = int(usable.sum())
    if contract.packing is Packing.NONE:
        occupied = len(usable) * contract.seq_length
    else:
        multiple = contract.segment_multiple if contract.packed else 1
        occupied = int(round_up(usable, multiple).sum())
    return {
        "samples": len(lengths),
        "left_out": len(lengths) - len(usable),
        "useful_slots": useful,
        "packs_at_least": ceil_div(occupied, contract.seq_length),
        "useful_fill_at_most": round(useful / occupied, 6) if occupied else 0.0,
    }
