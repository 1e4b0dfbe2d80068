"""What Megatron-Bridge and Megatron-Core themselves refuse once a job has started: specs, training step, graph replay.

Their own functions, up to the point where a model would compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.bridge.training import gpt_step, vlm_step
from megatron.bridge.training.config import ConfigContainer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer

__all__ = ["STEPS", "run_first_step"]

STEPS: dict[str, ModuleType] = {"gpt_step": gpt_step, "vlm_step": vlm_step}


class TakesBatches(Exception):
    """The step asks its iterator for a batch."""


def run_first_step(cfg: ConfigContainer, step: str) -> None:
    """Run what a validated job runs first. Raises whatever the stack refuses it with."""
    dataset = cfg.dataset
    specs = getattr(dataset, "offline_packing_specs", None)
    if specs is not None:
        specs.__post_init__()  # as a file or a recipe constructs them; a value that is set later passes it by
    with contextlib.suppress(TakesBatches):
        STEPS[step].forward_step(_state(cfg), _batches(), SimpleNamespace(config=cfg.model, pg_collection=_one_rank()))
    packed = specs is not None or getattr(dataset, "enable_in_batch_packing", False)
    if packed and cfg.model.cuda_graph_impl == "transformer_engine":
        _replay_graph(cfg.model)


def _batches() -> Iterator[Any]:
    raise TakesBatches
    yield


def _state(cfg: ConfigContainer) -> SimpleNamespace:
    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    return SimpleNamespace(
        cfg=cfg,
        timers=lambda *_args, **_kwargs: timer,
        straggler_timer=lambda **_kwargs: contextlib.nullcontext(),
    )


def _one_rank() -> SimpleNamespace:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    return SimpleNamespace(pp=group, cp=group, tp=group)


def _replay_graph(config: Any) -> None:
    """Replay the graph of a layer over packed rows: what it captures is not run, what it takes is checked."""
    hidden = torch.zeros(8, 1, 8)
    layer = SimpleNamespace(
        config=config,
        _forward_attention=lambda *_args, **_kwargs: (hidden, None),
        _te_cuda_graph_replay_impl=lambda *_args: hidden,
        off_interface=SimpleNamespace(enter_replay=lambda: None, exit_replay=lambda: None),
    )
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    TransformerLayer._te_cuda_graph_replay(
        layer, hidden, packed_seq_params=PackedSeqParams(cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    )
