"""One instance of every message, for the tests of the wire and of the session."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

from packhorse.contract.batch_contract import BatchContract, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.rows.payload import ArrayEntry
from packhorse.rules import Severity, Violation
from packhorse.wire.messages import (
    Ack,
    Batch,
    BatchBody,
    Bye,
    End,
    ErrorCode,
    GetSnapshot,
    Hello,
    Message,
    Reject,
    ServerError,
    Snapshot,
    SnapshotRef,
    Wait,
    WaitReason,
    Welcome,
)

__all__ = ["EXAMPLES", "EXTRA", "altered"]

Altered = TypeVar("Altered")

LAYOUT = ParallelLayout(data=2, context=2)
FACTS = TrainerFacts(stack=Stack.MEGATRON_LM, world_size=4, hierarchical_cp_sizes=(2, 1))
DECLARED = BatchContract(seq_length=16, partition=Partition.ZIGZAG, trainer=FACTS)
CONTRACT = resolve(DECLARED, LAYOUT, seq_length=16, global_batch_size=8, vocab_size=1000)

EXAMPLES: dict[str, Message] = {
    "HELLO": Hello(
        min_version=2,
        max_version=2,
        stream="train",
        reader=Coordinates(data=1, context=0, tensor=0, pipeline=0),
        client=bytes(range(16)),
        layout=LAYOUT,
        contract=DECLARED,
        contract_digest=b"\x22" * 16,
        attempt=b"attempt!",
        start=Position(2, 0),
        position=Position(3, 1),
        snapshots=(SnapshotRef(step=3, digest=b"\x33" * 16),),
        last_digest=b"\x44" * 16,
        window=4,
        start_timeout_s=540.0,
    ),
    "WELCOME": Welcome(
        stream="train",
        attempt=b"attempt!",
        fingerprint=b"\x55" * 16,
        position=Position(3, 1),
        contract=CONTRACT,
        keep_alive_s=1.0,
        warnings=(
            Violation(
                rule="PER_TOKEN_LOSS",
                severity=Severity.WARN,
                field="loss_reduction",
                want="per_token",
                got="mean",
                remedy="set per_token",
            ),
        ),
    ),
    "REJECT": Reject(
        stream="train",
        violations=(
            Violation(
                rule="WINDOW", severity=Severity.ERROR, field="window", want="2", got="1", remedy="set window to 2"
            ),
        ),
    ),
    "GET_SNAPSHOT": GetSnapshot(stream="train", step=3, digest=b"\x33" * 16),
    "SNAPSHOT": Snapshot(stream="train", step=3),
    "BATCH": Batch(
        stream="train",
        attempt=b"attempt!",
        low_watermark=Position(2, 3),
        body=BatchBody(
            step=3,
            index=1,
            num_tokens=8,
            num_loss_tokens=7,
            local_loss_tokens=3,
            step_tokens=80,
            step_loss_tokens=70,
            max_seqlen=8,
            slots=8,
            filler=False,
            row_digest=b"\x66" * 16,
            arrays=(
                ArrayEntry(name="cu_seqlens", dtype="<i4", length=4, offset=0),
                ArrayEntry(name="tokens", dtype="<u2", length=8, offset=64),
            ),
        ),
    ),
    "ACK": Ack(stream="train", attempt=b"attempt!", position=Position(3, 2), loop_idle_s=0.5),
    "WAIT": Wait(stream="train", reason=WaitReason.READERS, ranks=("rank 1 (dp1·cp0·tp0·pp0)",), waited_s=2.5),
    "END": End(stream="train", attempt=b"attempt!", position=Position(6, 0)),
    "ERROR": ServerError(stream="train", code=ErrorCode.REJOIN, message="look again", fatal=False),
    "BYE": Bye(stream="train"),
}

# Further frames that a message travels with.
EXTRA: dict[str, tuple[bytes, ...]] = {"BATCH": (b"payload",), "SNAPSHOT": (b"snapshot",)}


def altered(message: Altered, **values: Any) -> Altered:
    """A copy with other values: ``dataclasses.replace``, for a ``Struct`` too."""
    replace = structs.replace if isinstance(message, Struct) else dataclasses.replace
    return replace(message, **values)  # type: ignore[type-var]
