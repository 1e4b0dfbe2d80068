"""Balance window: the packs of several steps come together, and are assigned to those steps by cost.

A window begins where the one before ends. At the end of a finite stream the complete steps that are left form
a shorter one, and the packs of an incomplete last step stay together, in the order in which they came.

The packs of a window are assigned when the last of them has come, and nothing of that is in a snapshot: a step
inside a window is resumed behind from the window's beginning, and by passing over the steps before. Whoever resumes
there must assign the same packs again; where windows meet, anything but the order of samples may change.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import islice
from typing import Generic, Protocol, TypeVar

from packhorse.contract.batch_contract import Packing, ResolvedContract
from packhorse.errors import ConfigError, ContractError, ProtocolError
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import CostModel, assign_to_steps
from packhorse_service.planning.window_position import DIGEST_BYTES, WindowPosition

__all__ = [
    "AssignedStep",
    "BalanceWindow",
    "Pack",
    "PackSource",
    "ResumePoint",
    "State",
    "WindowPlan",
    "check_window",
    "plan_window",
]


class HasSlots(Protocol):
    """Pack, as far as it is planned with: the slots of each of its segments."""

    @property
    def slots(self) -> Sequence[int]:
        """Logical slots of each segment."""


Pack = TypeVar("Pack", bound=HasSlots)
State = TypeVar("State")  # of a source of packs; planning hands it on
Pack_co = TypeVar("Pack_co", bound=HasSlots, covariant=True)
State_co = TypeVar("State_co", covariant=True)


class PackSource(Protocol[Pack_co, State_co]):
    """Iterator over packs that has a state between two of them (``packing.pack_stream``)."""

    def __iter__(self) -> PackSource[Pack_co, State_co]:
        """Return itself: there is one order, and one place in it."""

    def __next__(self) -> Pack_co:
        """Return the next pack; raise ``StopIteration`` at the end, and again whenever asked there."""

    def state(self) -> State_co:
        """Return what the rest of the packs can be made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """Size of a window: ``steps`` of ``packs`` each; ``digest`` of all else that decides which steps get which."""

    steps: int
    packs: int  # of a step, over all data-parallel ranks
    seed: int
    cost: CostModel
    digest: bytes = bytes(DIGEST_BYTES)

    def position(self, offset: int = 0, steps: int = 0) -> WindowPosition:
        """Return the position ``offset`` steps into a window that has ``steps``; without them, where windows meet."""
        return WindowPosition(offset, steps, self.steps, self.packs, self.digest)


@dataclass(frozen=True, slots=True)
class ResumePoint(Generic[State]):
    """Place between two steps: the packs before ``step``, and how many steps of a window to pass over from there."""

    step: int
    packs: State
    window: WindowPosition


@dataclass(frozen=True, slots=True)
class AssignedStep(Generic[Pack, State]):
    """Packs of one step, in the order in which they came. Only the last step of a finite stream has too few."""

    step: int
    packs: Sequence[Pack]
    costs: Sequence[int]  # of each pack
    behind: ResumePoint[State]


def check_window(steps: int, contract: ResolvedContract) -> None:
    """Refuse a window where rows all cost the same, so that assigning them anew would only change their order."""
    if steps > 1 and (contract.concatenated or contract.packing is Packing.NONE):
        run_on = " and isolate_documents: false" if contract.concatenated else ""
        mode = f"contract.packing={contract.packing}{run_on}"
        raise ConfigError(
            f"packing.window={steps} needs rows that differ in cost: with {mode} all cost the same; "
            "leave packing.window at 1"
        )


def plan_window(steps: int, contract: ResolvedContract, packing: PackingPlan, cost: CostModel, seed: int) -> WindowPlan:
    """Describe the windows of a stream. Raises ``ConfigError`` where they make no sense."""
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


class BalanceWindow(Generic[Pack, State]):
    """Iterator over the steps of a stream of packs, which it takes window by window.

    Serving and both previews assign by this one. It holds a window's packs, and the state before them.
    """

    def __init__(
        self,
        packs: PackSource[Pack, State],
        plan: WindowPlan,
        first: int = 0,
        position: WindowPosition | None = None,
    ) -> None:
        """Begin a window at step ``first``, of which ``position`` says how many steps to pass over.

        Nothing is taken yet. Raises ``ContractError`` where the settings would assign that window otherwise.
        """
        self._packs, self._plan = packs, plan
        self._first = first  # step of the next window
        self._position = position or plan.position()
        self._assigned: deque[AssignedStep[Pack, State]] = deque()
        self._check_position()

    def _check_position(self) -> None:
        plan, position, first = self._plan, self._position, self._first
        if not position.offset or position == plan.position(position.offset, position.steps):
            return
        otherwise = ", and packs otherwise" if position.digest != plan.digest else ""
        raise ContractError(
            f"snapshot: step {first + position.offset} is inside a window of steps "
            f"{first} … {first + position.steps - 1}, assigned with packing.window={position.window} and "
            f"{position.packs} packs a step; this stream has packing.window={plan.steps} and {plan.packs} packs a "
            f"step{otherwise}; resume with the settings of the checkpoint, or from step {first} or "
            f"{first + position.steps}, where windows meet"
        )

    def __iter__(self) -> BalanceWindow[Pack, State]:
        return self

    def __next__(self) -> AssignedStep[Pack, State]:
        if not self._assigned:
            self._assign_window()
        if not self._assigned:
            raise StopIteration
        return self._assigned.popleft()

    def _assign_window(self) -> None:
        """Take the packs of a window and assign them; pass over the steps that were delivered before."""
        plan, first, position = self._plan, self._first, self._position
        before = self._packs.state()
        packs, steps, behind = self._take_window(before)
        if position.offset and steps != position.steps:
            raise ProtocolError(
                f"snapshot: the window at step {first} had {position.steps} steps, our data has {steps}; "
                "the shards differ"
            )
        costs = [plan.cost.cost(pack.slots) for pack in packs]
        whole = steps * plan.packs
        end = ResumePoint(first + steps, behind, plan.position())
        for number, chosen in enumerate(assign_to_steps(costs[:whole], steps, plan.seed)):
            inside = ResumePoint(first, before, plan.position(number + 1, steps))
            self._add_step(first + number, packs, costs, chosen, end if number + 1 == steps else inside)
        if len(packs) > whole:
            end = ResumePoint(first + steps + 1, self._packs.state(), plan.position())
            self._add_step(first + steps, packs, costs, range(whole, len(packs)), end)
        for _ in range(position.offset):
            self._assigned.popleft()
        self._first, self._position = end.step, plan.position()

    def _add_step(
        self,
        step: int,
        packs: Sequence[Pack],
        costs: Sequence[int],
        chosen: Sequence[int],
        behind: ResumePoint[State],
    ) -> None:
        """Add the step of the ``chosen`` packs of a window, which are numbers."""
        self._assigned.append(AssignedStep(step, [packs[i] for i in chosen], [costs[i] for i in chosen], behind))

    def _take_window(self, before: State) -> tuple[list[Pack], int, State]:
        """Take the packs of a window as they come; the number of complete steps, and the state behind those."""
        plan, steps, behind = self._plan, 0, before
        packs: list[Pack] = []
        while steps < plan.steps:
            packs += islice(self._packs, plan.packs)
            if len(packs) < (steps + 1) * plan.packs:
                break
            steps, behind = steps + 1, self._packs.state()
        return packs, steps, behind
