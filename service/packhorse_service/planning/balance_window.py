"""Windows: the packs of several steps are assembled together, and assigned to those steps by cost.

A window begins where the one before ends. At the end of a finite stream the complete steps that are left form
a shorter one, and the packs of an incomplete last step stay together, in the order in which they came.

The packs of a window are assigned when the last of them is assembled, and nothing of that is in a snapshot: one
taken inside a window is that of the window's beginning, and the number of steps to pass over. Whoever resumes
there must deal the same packs again; where windows meet, anything but the order of samples may change.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple

from packhorse.contract.batch_contract import Packing, ResolvedContract
from packhorse.errors import ConfigError, ContractError, ProtocolError
from packhorse_service.packing.modes import PackedMicroBatch
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import CostModel, assign_to_steps
from packhorse_service.planning.window_position import DIGEST_BYTES, WindowPosition
from packhorse_service.snapshot.codec import at_window_offset

__all__ = ["AssignedStep", "BalanceWindow", "WindowPlan", "check_window", "window_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """``steps`` of ``packs`` micro-batches each; ``digest`` of all else that decides which steps get which."""

    steps: int
    packs: int
    seed: int
    cost: CostModel
    digest: bytes

    def position(self, offset: int = 0, steps: int = 0) -> WindowPosition:
        """Of a place ``offset`` steps into a window that has ``steps``; or where windows meet."""
        return WindowPosition(offset, steps, self.steps, self.packs, self.digest)


class AssignedStep(NamedTuple):
    """One step's micro-batches, in the order of the pack stream. Only the last of a finite stream has too few."""

    micro_batches: Sequence[PackedMicroBatch]
    costs: list[int]  # of each
    snapshot: bytes  # of the stream behind this step


def check_window(steps: int, contract: ResolvedContract) -> None:
    """Refuse a window where rows all cost the same, so that dealing them anew would only change their order."""
    if steps > 1 and (contract.concatenated or contract.packing is Packing.NONE):
        run_on = " and isolate_documents: false" if contract.concatenated else ""
        mode = f"contract.packing={contract.packing}{run_on}"
        raise ConfigError(
            f"packing.window={steps} needs rows that differ in cost: with {mode} all cost the same; "
            "leave packing.window at 1"
        )


def window_plan(steps: int, contract: ResolvedContract, packing: PackingPlan, cost: CostModel, seed: int) -> WindowPlan:
    """Raises ``ConfigError`` where a window makes no sense."""
    check_window(steps, contract)
    decides = [
        asdict(packing),
        cost.linear,
        contract.packing,
        contract.isolate_documents,
        contract.seq_length,
        contract.segment_multiple,
        contract.micro_batch_size,
    ]
    return WindowPlan(
        steps=steps,
        packs=contract.global_batch_size // contract.micro_batch_size,
        seed=seed,
        cost=cost,
        digest=blake2b(json.dumps(decides, sort_keys=True).encode(), digest_size=DIGEST_BYTES).digest(),
    )


class BalanceWindow:
    """Deals a stream's micro-batches to steps, window by window."""

    def __init__(
        self,
        plan: WindowPlan,
        next_micro_batch: Callable[[], PackedMicroBatch | None],
        snapshot: Callable[[int], bytes],
    ) -> None:
        """``next_micro_batch`` gives nothing at the end; ``snapshot`` is of the stream now, before a given step."""
        self._plan = plan
        self._next_micro_batch = next_micro_batch
        self._snapshot = snapshot
        self.begin(0)

    def begin(self, first: int, position: WindowPosition | None = None) -> None:
        """A window begins at step ``first``; ``position`` says whether the stream goes on inside it.

        Raises ``ContractError`` where the settings would deal that window differently.
        """
        plan, position = self._plan, position or self._plan.position()
        otherwise = ", and packs otherwise" if position.digest != plan.digest else ""
        if position.offset and position != plan.position(position.offset, position.steps):
            raise ContractError(
                f"snapshot: step {first + position.offset} is inside a window of steps "
                f"{first} … {first + position.steps - 1}, assigned with "
                f"packing.window={position.window} and {position.packs} packs a step; this stream has "
                f"packing.window={plan.steps} and {plan.packs} packs a step{otherwise}; resume with the settings "
                f"of the checkpoint, or from step {first} or {first + position.steps}, where windows meet"
            )
        self._first = first
        self._position = position
        self._boundary = b""  # the snapshot before the window, where it was made behind the last one
        self._assigned: deque[AssignedStep] = deque()

    def next(self) -> AssignedStep | None:
        """The next step; ``None`` at the end."""
        if not self._assigned:
            self._assign()
        return self._assigned.popleft() if self._assigned else None

    def _assign(self) -> None:
        """Assemble a window and deal it; pass over the steps that were delivered before."""
        plan, first, position = self._plan, self._first, self._position
        packs, snapshots = self._assemble()
        steps = len(snapshots) - 1
        if position.offset and steps != position.steps:
            raise ProtocolError(
                f"snapshot: the window at step {first} had {position.steps} steps, our data has {steps}; "
                "the shards differ"
            )
        costs = [plan.cost.cost(pack.slots) for pack in packs]
        whole = steps * plan.packs
        assigned = assign_to_steps(costs[:whole], steps, plan.seed) if steps else []
        for number, of_step in enumerate(assigned, start=1):
            behind = snapshots[-1] if number == steps else at_window_offset(snapshots[0], plan.position(number, steps))
            self._assigned.append(AssignedStep([packs[i] for i in of_step], [costs[i] for i in of_step], behind))
        if len(packs) > whole:
            self._assigned.append(AssignedStep(packs[whole:], costs[whole:], self._snapshot(first + steps + 1)))
        for _ in range(position.offset):
            self._assigned.popleft()
        self._first, self._position = first + len(assigned) + (len(packs) > whole), plan.position()
        self._boundary = snapshots[-1] if len(packs) == whole else b""

    def _assemble(self) -> tuple[list[PackedMicroBatch], list[bytes]]:
        """The micro-batches of a window as they come, and snapshots before it and behind each complete step."""
        plan = self._plan
        packs: list[PackedMicroBatch] = []
        snapshots = [self._boundary or self._snapshot(self._first)]
        while len(snapshots) <= plan.steps:
            arrived = [pack for _ in range(plan.packs) if (pack := self._next_micro_batch()) is not None]
            packs += arrived
            if len(arrived) < plan.packs:
                break
            snapshots.append(self._snapshot(self._first + len(snapshots)))
        return packs, snapshots
