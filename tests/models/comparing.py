"""Loss and gradients of two ways to run the same model over the same targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["TOLERANCE", "Outcome", "outcome"]

TOLERANCE = 1e-5


class Outcome(NamedTuple):
    """Mean loss over all targets, and the gradient of each parameter by name."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def difference(self, other: Outcome) -> float:
        """The largest of the loss's and any gradient element's."""
        of_gradients = (float((self.gradients[name] - other.gradients[name]).abs().max()) for name in self.gradients)
        return max(abs(self.loss - other.loss), *of_gradients)


def outcome(model: torch.nn.Module, losses: Iterable[torch.Tensor]) -> Outcome:
    """Sum ``losses``, each already divided by the number of targets; they are computed one at a time."""
    model.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return Outcome(total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
