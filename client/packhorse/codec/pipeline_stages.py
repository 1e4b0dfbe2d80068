"""Fields of a micro-batch that each pipeline stage uses.

| stage  | uses                                    |
|--------|-----------------------------------------|
| first  | tokens and positions                    |
| middle | none of them                            |
| last   | labels and loss mask                    |
| only   | all four                                |

A stage with multi-token-prediction layers embeds and has a loss of its own, so it uses all four too. Some steps
read tokens on every stage: to place pictures, or to number the slots of a row of any width. In the packed modes
*every* stage needs the offsets: attention in a middle stage would otherwise run across segments. The padding
mask, where the contract asks for it, goes to every stage: MoE layers are everywhere.
"""

from __future__ import annotations

from enum import StrEnum

from packhorse.contract.layout import ParallelLayout

__all__ = ["METADATA", "Stage", "needed", "stage_of"]

EMBEDDING = frozenset({"tokens", "position_ids"})
LOSS = frozenset({"labels", "loss_mask"})
METADATA = frozenset({"cu_seqlens", "cu_seqlens_padded", "max_seqlen"})


class Stage(StrEnum):
    """Kind of place in the pipeline."""

    ONLY = "only"  # no pipeline parallelism
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


FIELDS = {Stage.ONLY: EMBEDDING | LOSS, Stage.FIRST: EMBEDDING, Stage.MIDDLE: frozenset[str](), Stage.LAST: LOSS}


def stage_of(layout: ParallelLayout, pipeline: int) -> Stage:
    """Return the stage at a pipeline coordinate.

    With virtual pipeline chunks it is the union of a rank's chunks: its first rank holds the first chunk, its
    last rank the last.
    """
    if layout.pipeline == 1:
        return Stage.ONLY
    if pipeline == 0:
        return Stage.FIRST
    return Stage.LAST if pipeline == layout.pipeline - 1 else Stage.MIDDLE


def needed(
    stage: Stage, *, packed: bool, mtp: bool = False, tokens: bool = False, padding_mask: bool = False
) -> frozenset[str]:
    """Return the fields of ``MicroBatch`` that a stage uses.

    ``mtp`` where it holds multi-token-prediction layers, ``tokens`` where the step reads tokens on every stage.
    """
    fields = EMBEDDING | LOSS if mtp else FIELDS[stage]
    if tokens:
        fields |= EMBEDDING
    if packed:
        fields |= METADATA
    return fields | {"padding_mask"} if padding_mask else fields
