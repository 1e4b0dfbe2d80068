"""Rules about the loss: what is averaged, by whom, and over what."""

from __future__ import annotations

from collections.abc import Iterator

from packhorse.contract.batch_contract import AttentionOffsets, LossReduction
from packhorse.rules.conditions import fine_tunes_across_context
from packhorse.rules.model import Breach, RuleInput, Severity

__all__ = [
    "mtp",
    "no_average_in_collective",
    "per_token_loss",
    "zero_loss",
]


def per_token_loss(given: RuleInput) -> Iterator[Breach]:
    """Fine-tuning with CP > 1 does not average per micro-batch; at CP 1 an average is a warning.

    With context parallelism and masked labels a rank may hold few supervised tokens or none. A mean of such
    slices weighs a token by the slice that it fell into; over none it is 0/0, or 0 where the stack clamps, as
    Megatron-LM does. Sum the loss and divide once by the tokens of all ranks. At CP 1 a mean of pack means weighs a
    sample by its neighbours.

    Source: Megatron-Bridge training/config.py, "calculate_per_token_loss must be True"; Megatron-LM
    core/pipeline_parallel/schedules.py, forward_step_calc_loss, which clamps.
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
    """Megatron's DDP does not average in the collective with a per-token loss, nor in fine-tuning with CP > 1.

    The loss is a sum over tokens that is divided once; averaging in the collective divides again. With a
    per-token loss DDP refuses it at every size and for every objective.

    Source: Megatron-LM core/distributed/distributed_data_parallel.py, "Cannot average in collective when calculating
    per-token loss"; Megatron-Bridge training/config.py, "average_in_collective must be False".
    """
    if given.trainer.megatron_ddp and given.trainer.average_in_collective:
        alone = "" if fine_tunes_across_context(given) else ", or calculate_per_token_loss to false"
        yield Breach("average_in_collective", "false", "true", f"set ddp.average_in_collective to false{alone}")


def zero_loss(given: RuleInput) -> Iterator[Breach]:
    """A trainer that averages per micro-batch without a clamp gets no micro-batch without supervised tokens.

    Where a finite stream does not fill its last step, fillers do: real rows whose loss is masked. Their mean
    is 0/0 unless the trainer clamps the denominator.

    Source: transformers' fixed_cross_entropy averages over labels that are not ignored; Megatron-LM clamps.
    """
    if given.trainer.clamps_zero_loss is False:
        yield Breach("remainder", "drop", "pad", "set remainder to drop, or loss_reduction to step_tokens")


def mtp(given: RuleInput) -> Iterator[Breach]:
    """Multi-token prediction over packed rows gets physical offsets.

    Its further targets are found by rolling each segment between the offsets that attention gets. Logical ones
    are no places of the row, which has padding between its segments: targets are taken from wrong slots, and with
    CP > 1 from beyond the row.

    Source: Megatron-LM core/transformer/multi_token_prediction.py, roll_tensor, cu_seqlens_q; Megatron-Bridge
    dropped its refusal as stale (pull request 5990).
    """
    layers, offsets = given.trainer.mtp_num_layers, given.contract.attention_offsets
    if layers and offsets is not AttentionOffsets.PHYSICAL:
        remedy = "set attention_offsets to physical, mtp_num_layers to 0, or packing to none"
        yield Breach("attention_offsets", f"physical with {layers} layers of MTP", str(offsets), remedy)
