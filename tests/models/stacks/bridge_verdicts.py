"""What Megatron-Bridge itself and Packhorse say of a configuration."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from megatron.bridge.training import config as bridge
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, not listed in __all__

from packhorse.declare import check_bridge
from packhorse.errors import ConfigError
from packhorse.rules import errors
from tests.models.stacks.first_step import run_first_step

__all__ = ["one_rank", "packhorse_refuses", "upstream_refuses"]


REFUSALS = (AssertionError, ValueError, TypeError, NotImplementedError, ZeroDivisionError, RuntimeError, AttributeError)


def upstream_refuses(cfg: ConfigContainer, world_size: int, step: str = "gpt_step") -> str:
    """Return why Bridge refuses a job as it starts, or at its first step; empty where it does not.

    As it starts: its update, validation, count of micro-batches, and wrapping of the model.
    """
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what counts is what it refuses
        patch.setattr(bridge, "get_world_size_safe", lambda: world_size)
        try:
            runtime_config_update(cfg)
            calculator._build_num_microbatches_calculator(
                1,
                cfg.train.global_batch_size,
                cfg.train.micro_batch_size,
                cfg.data_parallel_size,
                cfg.train.decrease_batch_size_if_needed,
            )
            _construct_ddp(cfg)
            run_first_step(cfg, step)
        except REFUSALS as refusal:
            return f"{type(refusal).__name__}: {refusal}"
    return ""


def _construct_ddp(cfg: ConfigContainer) -> None:
    """Wrap a layer as Bridge wraps a model: Megatron's DDP has checks of its own in its constructor."""
    if not cfg.dist.use_torch_fsdp2 and not cfg.ddp.use_megatron_fsdp:
        sums = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            calculate_per_token_loss=cfg.model.calculate_per_token_loss,
        )
        means = DistributedDataParallelConfig(average_in_collective=cfg.ddp.average_in_collective)
        DistributedDataParallel(sums, means, torch.nn.Linear(2, 2))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron's process groups of one rank on a CPU."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def packhorse_refuses(cfg: ConfigContainer, world_size: int, step: str | None = None) -> tuple[str, ...]:
    """Return the identifiers of the rules that are broken."""
    try:
        return tuple(sorted({violation.rule for violation in errors(check_bridge(cfg, world_size, step))}))
    except ConfigError as error:
        return (f"ConfigError: {error}",)
