"""The parallel layout of a job: its sizes, the coordinates of each rank, and their order.

Ranks map to coordinates in Megatron's default order, tensor fastest, then context, data and pipeline:
``tp-cp-ep-dp-pp``, in which the expert axis has size 1 where ranks read data (Megatron-Core places the experts of
its layers by a generator of its own), so that it is read and left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from packhorse.contract.documented import documented
from packhorse.errors import ConfigError

__all__ = ["Coordinates", "ParallelLayout"]

AXES = ("data", "context", "tensor", "pipeline")
ABBREVIATIONS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
DEFAULT_ORDER = "tp-cp-dp-pp"
EXPERT = "ep"  # in Megatron's orders; of size 1 for whoever reads data


class Coordinates(NamedTuple):
    """Place of a rank on each axis of its layout, counted from 0. Shown as ``dp0·cp1·tp0·pp0``."""

    data: int
    """Data-parallel rank (DP)."""
    context: int
    """Context-parallel rank (CP)."""
    tensor: int
    """Tensor-parallel rank (TP)."""
    pipeline: int
    """Pipeline-parallel rank (PP)."""

    def __str__(self) -> str:
        return f"dp{self.data}·cp{self.context}·tp{self.tensor}·pp{self.pipeline}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism of a trainer job: ``data``, ``context``, ``tensor`` and ``pipeline``, each 1 by default.

    Their product is the world size. ``sequence_parallel`` says that activations are split along the sequence over
    the tensor-parallel ranks. ``order`` names the axes from the fastest varying to the slowest, as Megatron's
    ``order`` argument does; its expert axis may be named, and is left out. ``mtp_stages`` are the pipeline stages
    other than the last that hold multi-token-prediction layers, where a ``pipeline_model_parallel_layout`` puts them.

    Raises ``ConfigError`` for a size below 1, an order that does not name each axis once, and a stage out of range.

    >>> ParallelLayout(data=2, context=2).coordinates(3)
    Coordinates(data=1, context=1, tensor=0, pipeline=0)
    """

    data: int = documented("Data-parallel size (DP).", 1)
    context: int = documented("Context-parallel size (CP).", 1)
    tensor: int = documented("Tensor-parallel size (TP).", 1)
    pipeline: int = documented("Pipeline-parallel size (PP).", 1)
    sequence_parallel: bool = documented(
        "Activations are split along the sequence over the tensor-parallel ranks.", False
    )
    order: str = documented("The axes from the fastest varying to the slowest.", DEFAULT_ORDER)
    mtp_stages: tuple[int, ...] = documented(
        "Pipeline stages, other than the last, that hold layers of multi-token prediction: they get whole rows.", ()
    )

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"layout.{axis}={size!r} must be an integer of at least 1")
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError(f"layout.sequence_parallel={self.sequence_parallel!r} must be true or false")
        if not isinstance(self.order, str):
            raise ConfigError(f"layout.order={self.order!r} must be text, as {DEFAULT_ORDER!r}")
        named = self.order.lower().split("-")
        if named.count(EXPERT) == 1:
            named.remove(EXPERT)
        if sorted(named) != sorted(ABBREVIATIONS.values()):
            raise ConfigError(
                f"layout.order={self.order!r} must name each of {', '.join(ABBREVIATIONS.values())} once, "
                f"joined by '-', fastest first; Megatron's default is {DEFAULT_ORDER!r}"
            )
        object.__setattr__(self, "order", "-".join(named))
        object.__setattr__(self, "mtp_stages", self._checked_stages())

    def _checked_stages(self) -> tuple[int, ...]:
        """Return ``mtp_stages`` in ascending order, without the last stage, which needs no naming."""
        stages = self.mtp_stages
        if not isinstance(stages, list | tuple) or any(type(stage) is not int for stage in stages):
            raise ConfigError(f"layout.mtp_stages={stages!r} must be a list of pipeline stages, as [2]")
        outside = [stage for stage in stages if not 0 <= stage < self.pipeline]
        if outside:
            raise ConfigError(
                f"layout.mtp_stages={stages!r} names stage {outside[0]}; there are 0 to {self.pipeline - 1}"
            )
        return tuple(sorted(set(stages) - {self.pipeline - 1}))

    @staticmethod
    def from_device_mesh(mesh: Any, *, sequence_parallel: bool = False) -> ParallelLayout:
        """Read the layout of a ``torch.distributed`` DeviceMesh, by the names of its dimensions.

        ``dp_replicate`` and ``dp_shard`` multiply; the names of torchtitan, accelerate, NeMo and FSDP2's examples are
        known. A mesh does not know sequence parallelism.

        Raises ``ConfigError`` for a dimension that has no place in a layout, and for ranks out of order.
        """
        from packhorse.declare.meshes import layout_from_device_mesh

        return layout_from_device_mesh(mesh, sequence_parallel=sequence_parallel)

    @staticmethod
    def from_environment(**sizes: Any) -> ParallelLayout:
        """Read the layout of this process's job; DP is what ``context``, ``tensor`` and ``pipeline`` leave.

        Megatron's ``parallel_state`` is asked where it is initialised, and then knows all sizes. Else the world
        size is that of torch.distributed, torchrun (``WORLD_SIZE``) or Slurm (``SLURM_NTASKS``), else 1.
        ``sequence_parallel`` and ``order`` are taken as given.

        Raises ``ConfigError`` for a world size that the sizes do not divide.
        """
        from packhorse.declare.meshes import layout_from_environment

        return layout_from_environment(**sizes)

    @staticmethod
    def from_megatron(args: object) -> ParallelLayout:
        """Read the layout of a Megatron-LM job from its argument namespace, after ``validate_args``."""
        from packhorse.declare.megatron import layout_from_megatron

        return layout_from_megatron(args)

    @staticmethod
    def from_megatron_bridge(cfg: object, world_size: int | None = None) -> ParallelLayout:
        """Read the layout of a Megatron-Bridge job from its ConfigContainer.

        ``world_size``: ranks of the job, where the configuration does not know it yet.
        """
        from packhorse.declare.bridge import layout_from_megatron_bridge

        return layout_from_megatron_bridge(cfg, world_size)

    @property
    def world_size(self) -> int:
        """Number of ranks: data · context · tensor · pipeline."""
        return self.data * self.context * self.tensor * self.pipeline

    def places_as(self, other: ParallelLayout) -> bool:
        """Return whether both orders give ranks the same places, where the sizes are the same.

        An axis of size 1 may stand anywhere.
        """
        return self._placing(other) == other._placing(self)

    def _placing(self, other: ParallelLayout) -> list[str]:
        """Return the axes that are larger than 1 here or there, fastest first."""
        axes = [(short, axis) for axis, short in ABBREVIATIONS.items()]
        large = {short for short, axis in axes if max(getattr(self, axis), getattr(other, axis)) > 1}
        return [short for short in self.order.split("-") if short in large]

    def _strides(self) -> list[tuple[str, int, int]]:
        """Return (axis, its size, ranks between neighbours on it), fastest axis first."""
        by_short = {short: axis for axis, short in ABBREVIATIONS.items()}
        axes = [by_short[short] for short in self.order.split("-")]
        sizes = [int(getattr(self, axis)) for axis in axes]
        return [(axis, size, math.prod(sizes[:i])) for i, (axis, size) in enumerate(zip(axes, sizes, strict=True))]

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank, counted from 0, stands on each axis.

        Raises ``ConfigError`` for a rank outside the layout.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank={rank} is outside the layout {self}, which has ranks 0 to {self.world_size - 1}; "
                "the layout's product must equal the world size"
            )
        return Coordinates(**{axis: rank // stride % size for axis, size, stride in self._strides()})

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates; the inverse of ``coordinates``."""
        return sum(int(getattr(at, axis)) * stride for axis, _, stride in self._strides())

    def __str__(self) -> str:
        sizes = "·".join(f"{ABBREVIATIONS[axis].upper()}{getattr(self, axis)}" for axis in AXES)
        return f"{sizes}{' SP' if self.sequence_parallel else ''}"
