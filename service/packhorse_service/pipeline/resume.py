"""Going on from a snapshot of other settings: what is refused, what changes, and what is said of it.

Layout, batch sizes, lookahead, alignment and ``seq_length`` may differ: the order of samples does not depend
on them, and the bits of a snapshot tell which pieces are packed. Where data or rendering differ, and that was
asked for, nobody can tell what was packed: the stream goes on where the snapshot's order stands, before the
oldest sample that waits, and what was drawn since is drawn again. Where their order differs, it begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packhorse.errors import ContractError
from packhorse_service.mixing.replay_log import StreamCursor
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.planning.balance_window import WindowPlan
from packhorse_service.snapshot.codec import PackShape, StreamSnapshot
from packhorse_service.snapshot.fingerprint import RESETS_SOURCES, RESUMABLE_CHANGES

__all__ = ["adapt_snapshot", "resume_warnings"]

MODES = {
    ConsumedUnit.LOOKAHEAD: "packing online, in_batch or none",
    ConsumedUnit.SLOTS: "packing concat and isolate_documents: true",
    ConsumedUnit.IDS: "packing concat and isolate_documents: false",
}


def adapt_snapshot(snapshot: StreamSnapshot, unit: ConsumedUnit) -> StreamSnapshot:
    """Return the snapshot as a stream of this kind goes on from it. Raises ``ContractError`` where it cannot."""
    step, window = snapshot.step, snapshot.window
    if snapshot.consumed_unit is not unit:
        raise ContractError(
            f"snapshot: made with contract.{MODES[snapshot.consumed_unit]}, this stream has {MODES[unit]}: "
            "what is a target differs; resume with the mode of the checkpoint"
        )
    if not snapshot.changed:
        return snapshot
    if window.offset:
        raise ContractError(
            f"snapshot: step {step + window.offset} is inside a window of steps {step} … {step + window.steps - 1}, "
            f"and {', '.join(snapshot.changed)} may not change there; resume from step {step} or "
            f"{step + window.steps}, where windows meet"
        )
    order = snapshot.cursor.order.clone()
    for source in order.sources:
        for shard in source.open:
            shard.checksum = 0  # its samples may be others
    if "mixture" in snapshot.changed:
        order.reset_shares()
    return snapshot._replace(cursor=StreamCursor(order, (), np.empty(0, np.uint8)), consumed=0)


def resume_warnings(snapshot: StreamSnapshot, shape: PackShape, plan: WindowPlan) -> Iterator[str]:
    """Return what whoever resumes a stream of this shape and plan from the snapshot should know."""
    step, window = snapshot.step + snapshot.window.offset, snapshot.window
    for part in snapshot.changed:
        yield f"from step {step} on {part} differs from the checkpoint's, as allowed: {RESUMABLE_CHANGES[part]}"
    if snapshot.changed and not RESETS_SOURCES.intersection(snapshot.changed):
        drawn = sum(cut.draws for cut in snapshot.cursor.cut_lengths)
        yield (
            f"the {drawn} samples drawn last before step {step}, all that wait among them, are drawn again: "
            "those that were packed are delivered twice, and none is lost"
        )
    named = zip(PackShape._fields, snapshot.shape, shape, strict=True)
    differing = ", ".join(f"contract.{name} {before} → {now}" for name, before, now in named if before != now)
    if window.digest != plan.digest:
        yield (
            f"from step {step} on packs differ from those of the checkpoint's settings: "
            f"{differing or 'packing settings have changed'}; each target is delivered once all the same"
        )
    if window.packs != plan.packs:
        yield f"from step {step} on a step has {plan.packs} micro-batches in all, before it had {window.packs}"
