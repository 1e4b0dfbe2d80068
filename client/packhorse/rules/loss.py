"""Rules about the loss: what is averaged, by whom, and over what."""

from __future__ import annotations

from collections.abc import Iterator

from packhorse.contract.batch_contract import LossReduction
from packhorse.rules.model import Breach, RuleInput, Severity

__all__ = [
    "mtp",
    "no_average_in_collective",
    "per_token_loss",
    "zero_loss",
]


def per_token_loss(given: RuleInput) -> Iterator[Breach]:
    """Fine-tuning with CP > 1 does not average per micro-batch; at CP 1 an average is a warning.

    With context parallelism and masked labels a rank may hold no supervised token, and its mean is 0/0: sum
    the loss and divide once by the tokens of all ranks. At CP 1 the mean is defined, but a mean of pack
    means weighs a sample by its neighbours.

    Source: Megatron-Bridge training/config.py, "calculate_per_token_loss must be True".
    """
    if given.contract.loss_reduction is LossReduction.MEAN:
        yield Breach(
            "loss_reduction",
            "per_token or step_tokens",
            "mean",
            "use step_tokens and divide by MicroBatch.step_loss_tokens, or per_token where the stack reduces "
            "(Megatron: calculate_per_token_loss)",
            Severity.ERROR if given.layout.context > 1 else Severity.WARN,
        )


def no_average_in_collective(given: RuleInput) -> Iterator[Breach]:
    """Fine-tuning with CP > 1 under Megatron's DDP does not average gradients in the collective.

    The loss is a sum over tokens that is divided once; averaging in the collective divides again.

    Source: Megatron-Bridge training/config.py, "average_in_collective must be False".
    """
    if given.trainer.megatron_ddp and given.trainer.average_in_collective:
        yield Breach("average_in_collective", "false", "true", "set ddp.average_in_collective to false")


def zero_loss(given: RuleInput) -> Iterator[Breach]:
    """A trainer that averages per micro-batch without a clamp gets no micro-batch without supervised tokens.

    Where a finite stream does not fill its last step, fillers do: real rows whose loss is masked. Their mean
    is 0/0 unless the trainer clamps the denominator.

    Source: transformers' fixed_cross_entropy averages over labels that are not ignored; Megatron-LM clamps.
    """
    if given.trainer.clamps_zero_loss is False:
        yield Breach("remainder", "drop", "pad", "set remainder to drop, or loss_reduction to step_tokens")


def mtp(given: RuleInput) -> Iterator[Breach]:
    """Multi-token prediction is off in packed fine-tuning.

    Its further targets are found by rolling the row, across the segments' borders.

    Source: Megatron-Bridge docs/training/multi-token-prediction.md, stated but not validated there.
    """
    layers = given.trainer.mtp_num_layers
    if layers:
        yield Breach("mtp_num_layers", "0", str(layers), "set mtp_num_layers to 0, or packing to none")
