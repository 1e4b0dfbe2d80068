"""Layout of a job from a device mesh, or from what its processes know: Megatron's groups, the world size."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from packhorse.contract.layout import ABBREVIATIONS, DEFAULT_ORDER, Coordinates, ParallelLayout
from packhorse.declare.rank_info import RankInfo, rank_sources
from packhorse.errors import ConfigError

__all__ = ["layout_from_device_mesh", "layout_from_environment"]

# The names that torchtitan, accelerate, NeMo and FSDP2 examples give to the dimensions of their meshes.
DIMENSIONS = {
    "data": ("dp", "data", "data_parallel", "dp_replicate", "dp_shard", "ddp", "fsdp", "hsdp", "replicate", "shard"),
    "context": ("cp", "context", "context_parallel"),
    "tensor": ("tp", "tensor", "tensor_parallel"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel"),
}
AXIS_OF = {name: axis for axis, names in DIMENSIONS.items() for name in names}


def layout_from_device_mesh(mesh: Any, *, sequence_parallel: bool = False) -> ParallelLayout:
    """Read sizes and order of a ``torch.distributed`` DeviceMesh, by the names of its dimensions.

    Several data dimensions (``dp_replicate`` and ``dp_shard``) multiply and must stand side by side. A
    dimension of another name is refused unless its size is 1. A mesh does not know sequence parallelism.

    Raises ``ConfigError`` for a mesh without names, with a dimension that is refused, or with ranks out of order.
    """
    names: Sequence[str] | None = mesh.mesh_dim_names
    if not names:
        raise ConfigError(
            "the device mesh has no mesh_dim_names; give them, for example ('pp', 'dp_shard', 'cp', 'tp')"
        )
    slowest_first: list[str] = []
    sizes: dict[str, Any] = dict.fromkeys(ABBREVIATIONS, 1)
    for name, size in zip(names, mesh.shape, strict=True):
        axis = AXIS_OF.get(name)
        if axis is None and size == 1:
            continue
        if axis is None or (axis in slowest_first and slowest_first[-1] != axis):
            raise ConfigError(_refused(name, size, names))
        if axis not in slowest_first:
            slowest_first.append(axis)
        sizes[axis] *= int(size)
    _refuse_shuffled(mesh)
    absent = [axis for axis in ABBREVIATIONS if axis not in slowest_first]
    order = "-".join(ABBREVIATIONS[axis] for axis in [*reversed(slowest_first), *absent])
    return ParallelLayout(**sizes, sequence_parallel=sequence_parallel, order=order if slowest_first else DEFAULT_ORDER)


def _refused(name: str, size: int, names: Sequence[str]) -> str:
    if name in AXIS_OF:
        return f"dimension {name!r} of the device mesh {tuple(names)} must stand beside the other of its axis"
    known = ", ".join(AXIS_OF)
    return (
        f"dimension {name!r} (size {size}) of the device mesh {tuple(names)} has no place in a layout; "
        f"pass a mesh of {known}"
    )


def _refuse_shuffled(mesh: Any) -> None:
    """Refuse ranks that do not count up along the dimensions: a layout tells coordinates from the rank alone."""
    ranks = getattr(mesh, "mesh", None)
    if ranks is None:
        return
    flat = [int(rank) for rank in ranks.flatten().tolist()]
    if flat != list(range(len(flat))):
        raise ConfigError(
            f"the device mesh holds the ranks {flat[:8]}…, must count from 0 in order; pass the mesh of the whole job"
        )


def layout_from_environment(
    *,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    sequence_parallel: bool = False,
    order: str = DEFAULT_ORDER,
    environ: Mapping[str, str] = os.environ,
) -> ParallelLayout:
    """Read the layout of this process's job; DP is what the other sizes leave of the world size.

    Where Megatron's ``parallel_state`` is initialised it knows all sizes, and the arguments are not asked, but for
    the order: one that puts this rank elsewhere than Megatron has it is refused. Else the world size comes from
    torch.distributed, torchrun (``WORLD_SIZE``) or Slurm (``SLURM_NTASKS``), and is 1 where none tells.

    Raises ``ConfigError`` for such an order, and where the world size does not divide.
    """
    state = sys.modules.get("megatron.core.parallel_state")  # asked only where the trainer has imported it
    if state is not None and state.model_parallel_is_initialized():
        return _layout_of_megatron(state, environ, sequence_parallel=sequence_parallel, order=order)
    _, size, source = next(rank_sources(environ), RankInfo(0, 1, "nobody"))
    share = context * tensor * pipeline
    if share < 1 or size % share:
        raise ConfigError(
            f"world size {size} (from {source}) must be a multiple of context · tensor · pipeline = {share}; "
            "pass the sizes of this job"
        )
    return ParallelLayout(
        data=size // share,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        sequence_parallel=sequence_parallel,
        order=order,
    )


def _layout_of_megatron(
    state: Any, environ: Mapping[str, str], *, sequence_parallel: bool, order: str
) -> ParallelLayout:
    """Return the layout of Megatron's initialised groups, in which this rank stands where Megatron has it."""
    layout = ParallelLayout(
        data=state.get_data_parallel_world_size(),
        context=state.get_context_parallel_world_size(),
        tensor=state.get_tensor_model_parallel_world_size(),
        pipeline=state.get_pipeline_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        order=order,
    )
    here = Coordinates(
        data=state.get_data_parallel_rank(),
        context=state.get_context_parallel_rank(),
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
    )
    found = next((place.rank for place in rank_sources(environ) if place.world_size == layout.world_size), None)
    if found is not None and layout.coordinates(found) != here:
        raise ConfigError(
            f"layout.order={order!r} puts rank {found} at {layout.coordinates(found)}, and Megatron has it at {here}; "
            "pass order as initialize_model_parallel got it, without ep"
        )
    return layout
