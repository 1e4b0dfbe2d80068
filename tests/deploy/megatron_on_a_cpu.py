"""Run ``train_megatron.py`` on a CPU, one rank wide: what it asks of CUDA it gets from the CPU.

``python -m tests.deploy.megatron_on_a_cpu ARGUMENTS`` with torchrun's variables set. Megatron's own attention needs
CUDA, or refuses packed data, so the one of ``tests/models`` is in its place; everything else is the script's.
"""

from __future__ import annotations

import contextlib
import runpy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

from tests.deploy.tools import DEPLOY

CPU = torch.device("cpu")


class OnTheCpu(TorchFunctionMode):
    """Whatever is made on CUDA is made here."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **named)


def main() -> None:
    warnings.simplefilter("ignore")  # Megatron warns of accelerator libraries that are not here
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import random

    from tests.models.test_megatron_core import OffsetAttention

    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = OffsetAttention
    join = distributed.init_process_group
    with contextlib.ExitStack() as stack:
        stack.enter_context(OnTheCpu())
        for owner, name, instead in (
            (gpt_layer_specs, "get_gpt_layer_with_transformer_engine_spec", lambda: spec),
            (distributed, "init_process_group", lambda _backend: join("gloo")),
            (random, "_get_cuda_rng_state", lambda **_: torch.get_rng_state()),
            (random, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)),
            (torch.cuda, "get_rng_state", torch.get_rng_state),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "set_device", lambda _device: None),
            (torch.cuda, "synchronize", lambda: None),
            (torch.cuda, "current_device", lambda: CPU),
            (torch.nn.Module, "cuda", lambda module: module),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        runpy.run_path(str(DEPLOY / "trainers" / "train_megatron.py"), run_name="__main__")


if __name__ == "__main__":
    main()
