"""The conformance cases: facts about upstream stacks as data, and which of them do not concern us.

A file holds either ``cases``, each naming its ``op``, or ``groups`` of cases that share one. Whether a case
concerns us is decided by what it is about, its operation and input, never by its id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Case", "folder", "load", "why_not_ours"]

DEFAULT_FOLDER = Path(__file__).parents[3] / "shared" / "conformance"


@dataclass(frozen=True, slots=True)
class Case:
    """One case. ``group`` holds what the cases of a group share: defaults, say."""

    id: str
    op: str
    suite: str
    input: Mapping[str, Any]
    expect: Any
    raw: Mapping[str, Any]
    group: Mapping[str, Any]

    @property
    def rejects(self) -> bool:
        return isinstance(self.expect, dict) and self.expect.get("outcome") == "reject"


def folder() -> Path:
    return Path(os.environ.get("PACKHORSE_VECTORS", DEFAULT_FOLDER))


def load(where: Path) -> list[Case]:
    """Every case of every file of a folder, in order."""
    return [case for path in sorted(where.glob("*.json")) for case in _cases(path)]


def _cases(path: Path) -> Iterator[Case]:
    content = json.loads(path.read_text())
    for group in content.get("groups", [{"id": path.stem, "cases": content.get("cases", [])}]):
        shared = {key: value for key, value in group.items() if key != "cases"}
        for raw in group["cases"]:
            yield Case(
                id=f"{shared['id']}/{raw['id']}",
                op=raw.get("op", shared.get("op", "")),
                suite=str(raw.get("suite", "")),
                input=raw["input"],
                expect=raw["expect"],
                raw=raw,
                group=shared,
            )


# What does not concern us --------------------------------------------------------------------------------


class Exclusion(NamedTuple):
    """Cases that are about something Packhorse leaves out, and why."""

    reason: str
    covers: Callable[[Case], bool]


def _of(*ops: str) -> Callable[[Case], bool]:
    return lambda case: case.op in ops


def _op_with(op: str, *keys: str) -> Callable[[Case], bool]:
    return lambda case: case.op == op and any(key in case.input for key in keys)


def _lengths_must_be_guessed(case: Case) -> bool:
    """A row that is not right-padded, with nothing that says how long it is."""
    pad = case.input.get("pad_token", 0)
    rows = case.input.get("rows") or []
    if case.op != "pack_rows" or case.input.get("attention_mask") is not None:
        return False
    return any(row[i] == pad and row[i + 1] != pad for row in rows for i in range(len(row) - 1))


def _superseded(case: Case) -> bool:
    return case.op == "pack_rows" and case.suite.split(" ")[0] == "old"


EXCLUSIONS = (
    Exclusion(
        "dynamic context parallelism and packing schedulers move samples after loading: DYNAMIC_CP refuses them",
        _of("dynamic_cp_degree", "dynamic_cp_groups", "hybrid_cp_groups", "dp_balanced_groups"),
    ),
    Exclusion("a remark, not an operation", _of("note")),
    Exclusion(
        "halves of a slice that ring attention exchanges inside its kernel; nothing that is delivered",
        _of("local_half_ranges"),
    ),
    Exclusion(
        "repairs padding that holds -1; our padding is pad_id and ignore_index from the start",
        _of("sanitize_padding_values"),
    ),
    Exclusion("offline packing: packs are built on the fly, nothing is padded in storage", _of("pre_pad_lengths")),
    Exclusion("first-fit bins: our packer fills in order and closes exactly (DESIGN §7)", _of("first_fit")),
    Exclusion("offline packed rows are not a source; samples are", _of("validate_packed_row")),
    Exclusion(
        "our rows hold segments, so no global batch is split into micro-batches", _op_with("num_microbatches", "rows")
    ),
    Exclusion(
        "unpacks a row for multimodal position ids; v1 carries no media",
        _op_with("normalize_packed_metadata", "row", "rows", "row_len", "position_ids"),
    ),
    Exclusion(
        "ranks come from the layout; no process group is passed, so none can disagree",
        _op_with("normalize_packed_metadata", "group"),
    ),
    Exclusion(
        "a version gate of Bridge's own helper; ours builds the fields that a version has",
        _op_with("normalize_packed_metadata", "megatron_core"),
    ),
    Exclusion(
        "multimodal stages need media tensors; v1 carries none",
        lambda case: case.op == "required_keys" and "vlm" in case.input.get("framework", ""),
    ),
    Exclusion("a file beside stored packs; we store none", _op_with("validate_config", "artifact")),
    Exclusion(
        "positions are never given, they follow from the offsets",
        lambda case: case.op == "pack_rows" and case.input.get("position_ids", 0) is None,
    ),
    Exclusion("lengths are explicit, never guessed from padding values (DESIGN §5)", _lengths_must_be_guessed),
    Exclusion("behaviour of an older version, which its successor refuses as we do", _superseded),
)


def why_not_ours(case: Case) -> str | None:
    """The reason for which a case does not concern us; ``None`` where it does."""
    return next((exclusion.reason for exclusion in EXCLUSIONS if exclusion.covers(case)), None)
