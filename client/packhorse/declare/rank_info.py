"""Rank of this process: from arguments, torch.distributed, torchrun or Slurm, in that order."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError

__all__ = ["RankInfo", "detect_rank", "rank_sources"]


class RankInfo(NamedTuple):
    """Rank of a process, the world size, and who told them, in words."""

    rank: int
    world_size: int
    source: str


# (who sets them, the variable of the rank, that of the world size)
VARIABLES = (("torchrun", "RANK", "WORLD_SIZE"), ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"))


def detect_rank(
    layout: ParallelLayout,
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RankInfo:
    """Return rank and world size of this process; an argument wins over torch.distributed and the environment.

    A layout of one rank needs none of them. Raises ``ConfigError`` where nothing tells the rank, or a
    variable is not a number.
    """
    if rank is not None:
        return RankInfo(rank, layout.world_size if world_size is None else world_size, "arguments")
    found = next(rank_sources(environ), None)
    if found is not None:
        return found if world_size is None else found._replace(world_size=world_size)
    if layout.world_size == 1:
        return RankInfo(0, 1 if world_size is None else world_size, "the layout")
    names = ", ".join(f"{rank_name} ({who})" for who, rank_name, _ in VARIABLES)
    raise ConfigError(f"rank is not known: torch.distributed is not initialised and none of {names} is set; pass rank=")


def rank_sources(environ: Mapping[str, str] = os.environ) -> Iterator[RankInfo]:
    """Yield what torch.distributed, torchrun and Slurm say of this process, in that order."""
    distributed = sys.modules.get("torch.distributed")  # asked only where the trainer has imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield RankInfo(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")
    for who, rank_name, size_name in VARIABLES:
        if rank_name in environ and size_name in environ:
            yield RankInfo(_number(environ, rank_name), _number(environ, size_name), who)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={environ[name]!r} must be an integer") from error
