"""Inert modules in the place of libraries that need CUDA, so that the stacks' configuration code can be imported.

Nothing of a stack is altered: the modules only let ``import`` statements and base classes succeed. What they
stand for is never run here, and whatever is asked of them is another inert class.
"""

from __future__ import annotations

import sys
import types
import typing
from abc import ABCMeta
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import typing_extensions

__all__ = ["install"]

ABSENT = frozenset(
    {
        "google",
        "megatron.energon",
        "transformer_engine",
        "transformer_engine_torch",
        "transformers.modeling_attn_mask_utils",  # of a release that Bridge allows, not of the one that is tested
        "triton",
        "modelopt",
        "nvidia_resiliency_ext",
        "wandb",
        "diffusers",
        "datasets",
        "torchvision",
        "peft",
        "qwen_vl_utils",
        "tensorboard",
    }
)
TRANSFORMER_ENGINE = "2.16.0"


class InertType(ABCMeta):
    """Class whose attributes are inert classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return InertType(name, (Inert,), {})


class Inert(metaclass=InertType):
    """Base class, decorator or value that does nothing."""

    def __new__(cls, *args: Any, **_kwargs: Any) -> Any:
        """Return the decorated function where used as a decorator, else an inert instance."""
        if cls.__init__ is Inert.__init__ and len(args) == 1 and isinstance(args[0], types.FunctionType):
            return args[0]
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        """Return what is decorated, or an inert instance."""
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class InertModule(types.ModuleType):
    """Module with every name."""

    __version__ = TRANSFORMER_ENGINE

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package: its modules are found as it is

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = InertType(name, (Inert,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class InertFinder(MetaPathFinder, Loader):
    """Finder of the last resort for ``ABSENT``: a library that is installed is found before it."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a specification of an inert module, for an absent library and its parts."""
        parts = fullname.split(".")
        if ABSENT.isdisjoint(".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return the inert module."""
        return InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def install() -> None:
    """Let absent libraries be imported, and report one H100 with nothing on it."""
    sys.meta_path.append(InertFinder())
    if not hasattr(typing, "override"):  # the wheels are for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    h100 = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    answers = {
        "get_device_properties": h100,
        "get_device_capability": (h100.major, h100.minor),
        "get_device_name": h100.name,
        "current_device": 0,
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, lambda *_, answer=answer: answer)
