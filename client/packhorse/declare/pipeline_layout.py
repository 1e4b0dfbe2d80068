"""Reading of a ``pipeline_model_parallel_layout``: which pipeline stages hold layers of multi-token prediction.

Megatron-Core has it as text (``Et*3|(tt|)*29m|L``: stages by ``|``, ``*n`` repeats a letter or a group), as a list of
stages that are lists of names, or as its own parsed object, ``.layout[stage][chunk]``. Stage i of a text or a list is
chunk i // PP of pipeline rank i % PP. Source: megatron-core 0.19.2,
core/transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from packhorse.errors import ConfigError

__all__ = ["mtp_stages_of"]

MTP = "mtp"
NAMES = {"E": "embedding", "t": "decoder", "m": MTP, "L": "loss"}
GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
LETTER = re.compile(r"(.)\*(\d+)")
REPEATS_LIMIT = 10_000  # of one group or letter: more is no pipeline


def mtp_stages_of(layout: object, pipeline: int) -> tuple[int, ...]:
    """Return the pipeline ranks, ascending, that hold multi-token-prediction layers; none without a layout.

    Raises ``ConfigError`` for a layout of another form, or one that ``pipeline`` ranks do not divide.
    """
    if layout is None:
        return ()
    parsed = getattr(layout, "layout", None)
    if parsed is not None:
        return tuple(rank for rank, chunks in enumerate(parsed) if any(map(_holds_mtp, chunks)))
    stages = _stages_of_text(layout) if isinstance(layout, str) else layout
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, list | tuple) for stage in stages):
        raise ConfigError(
            f"pipeline_model_parallel_layout={layout!r:.200} must be text, a list of lists or Megatron's own object"
        )
    if len(stages) % pipeline:
        raise ConfigError(
            f"pipeline_model_parallel_layout={layout!r:.200} has {len(stages)} stages, must be a multiple of the "
            f"pipeline size {pipeline}"
        )
    return tuple(sorted({i % pipeline for i, stage in enumerate(stages) if _holds_mtp(stage)}))


def _holds_mtp(stage: Sequence[object]) -> bool:
    """Return whether a stage names a multi-token-prediction layer: by a string, or by an enum member of that name."""
    return any(str(getattr(layer, "name", layer)).strip().lower() == MTP for layer in stage)


def _stages_of_text(text: str) -> list[list[str]]:
    plain = LETTER.sub(_repeated, GROUP.sub(_repeated, text.replace(",", "")))
    unknown = set(plain) - {*NAMES, "|"}
    if unknown:
        raise ConfigError(
            f"pipeline_model_parallel_layout={text!r:.200} has {sorted(unknown)[0]!r}; its letters are "
            f"{', '.join(NAMES)}, with |, *n and groups in brackets"
        )
    return [[NAMES[letter] for letter in stage] for stage in plain.split("|")]


def _repeated(found: re.Match[str]) -> str:
    what, count = found.group(1), int(found.group(2))
    if count > REPEATS_LIMIT:
        raise ConfigError(f"pipeline_model_parallel_layout repeats {what!r:.40} {count} times")
    return what * count
