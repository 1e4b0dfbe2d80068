"""Windows: the packs of several steps are assembled together, and dealt to those steps by cost.

A window begins where the one before ends. At the end of a finite stream the complete steps that are left form
a shorter one, and the packs of an incomplete last step stay together, in the order in which they came.

The packs of a window are dealt when the last of them is assembled, and nothing of that is in a snapshot: one
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
from packhorse_service.packing.modes import Assembled
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import CostModel, deal_window
from packhorse_service.planning.window_mark import DIGEST_BYTES, WindowMark
from packhorse_service.snapshot.codec import inside_window

__all__ = ["DealtStep", "WindowPlan", "Windows", "check_window", "window_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """``steps`` of ``packs`` micro-batches each; ``digest`` of all else that decides which steps get which."""

    steps: int
    packs: int
    seed: int
    cost: CostModel
    digest: bytes

    def mark(self, skip: int = 0, steps: int = 0) -> WindowMark:
        """Of a place ``skip`` steps into a window that has ``steps``; or where windows meet."""
        return WindowMark(skip, steps, self.steps, self.packs, self.digest)


class DealtStep(NamedTuple):
    """One step's micro-batches, in the order of the pack stream. Only the last of a finite stream has too few."""

    micro_batches: Sequence[Assembled]
    costs: list[int]  # of each
    snapshot: bytes  # of the stream behind this step


def check_window(steps: int, contract: ResolvedContract) -> None:
    """Refuse a window where rows all cost the same, so that dealing them anew would only change their order."""
    run = contract.packing is Packing.CONCAT and not contract.isolate_documents
    if steps > 1 and (run or contract.packing is Packing.NONE):
        mode = f"contract.packing={contract.packing}" + (" and isolate_documents: false" if run else "")
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


class Windows:
    """Deals a stream's micro-batches to steps, window by window."""

    def __init__(
        self, plan: WindowPlan, next_micro_batch: Callable[[], Assembled | None], snapshot: Callable[[int], bytes]
    ) -> None:
        """``next_micro_batch`` gives nothing at the end; ``snapshot`` is of the stream now, before a given step."""
        self._plan = plan
        self._next_micro_batch = next_micro_batch
        self._snapshot = snapshot
        self.begin(0)

    def begin(self, first: int, mark: WindowMark | None = None) -> None:
        """A window begins at step ``first``; ``mark`` says whether the stream goes on inside it.

        Raises ``ContractError`` where the settings would deal that window differently.
        """
        plan, mark = self._plan, mark or self._plan.mark()
        otherwise = ", and packs otherwise" if mark.digest != plan.digest else ""
        if mark.skip and mark != plan.mark(mark.skip, mark.steps):
            raise ContractError(
                f"snapshot: step {first + mark.skip} is inside a window of steps {first} … {first + mark.steps - 1}, "
                f"dealt with packing.window={mark.window} and {mark.packs} packs a step; this stream has "
                f"packing.window={plan.steps} and {plan.packs} packs a step{otherwise}; resume with the settings "
                f"of the checkpoint, or from step {first} or {first + mark.steps}, where windows meet"
            )
        self._first = first
        self._mark = mark
        self._boundary = b""  # the snapshot before the window, where it was made behind the last one
        self._dealt: deque[DealtStep] = deque()

    def next(self) -> DealtStep | None:
        """The next step; ``None`` at the end."""
        if not self._dealt:
            self._deal()
        return self._dealt.popleft() if self._dealt else None

    def _deal(self) -> None:
        """Assemble a window and deal it; pass over the steps that were delivered before."""
        plan, first, mark = self._plan, self._first, self._mark
        packs, snapshots = self._assemble()
        steps = len(snapshots) - 1
        if mark.skip and steps != mark.steps:
            raise ProtocolError(
                f"snapshot: the window at step {first} had {mark.steps} steps, our data has {steps}; the shards differ"
            )
        costs = [plan.cost.cost(pack.slots) for pack in packs]
        whole = steps * plan.packs
        dealt = deal_window(costs[:whole], steps, plan.seed) if steps else []
        for number, of_step in enumerate(dealt, start=1):
            behind = snapshots[-1] if number == steps else inside_window(snapshots[0], plan.mark(number, steps))
            self._dealt.append(DealtStep([packs[i] for i in of_step], [costs[i] for i in of_step], behind))
        if len(packs) > whole:
            self._dealt.append(DealtStep(packs[whole:], costs[whole:], self._snapshot(first + steps + 1)))
        for _ in range(mark.skip):
            self._dealt.popleft()
        self._first, self._mark = first + len(dealt) + (len(packs) > whole), plan.mark()
        self._boundary = snapshots[-1] if len(packs) == whole else b""

    def _assemble(self) -> tuple[list[Assembled], list[bytes]]:
        """The micro-batches of a window as they come, and snapshots before it and behind each complete step."""
        plan = self._plan
        packs: list[Assembled] = []
        snapshots = [self._boundary or self._snapshot(self._first)]
        while len(snapshots) <= plan.steps:
            arrived = [pack for _ in range(plan.packs) if (pack := self._next_micro_batch()) is not None]
            packs += arrived
            if len(arrived) < plan.packs:
                break
            snapshots.append(self._snapshot(self._first + len(snapshots)))
        return packs, snapshots
