"""What one reader knows of its stream, whatever state its conversation with a server is in."""

from __future__ import annotations

from dataclasses import dataclass, field

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import BatchContract, ResolvedContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError, ProtocolError
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.effects import Deliver
from packhorse.protocol.held_snapshots import HeldSnapshots
from packhorse.rules import Violation
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import (
    DEFAULT_KEEP_ALIVE_S,
    PROTOCOL_VERSION,
    Ack,
    Hello,
    Wait,
    Welcome,
)

__all__ = ["Agreement", "Identity", "ReaderProgress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Declaration of one reader; constant for the life of a Feed."""

    stream: str
    reader: Coordinates
    client: bytes
    layout: ParallelLayout
    contract: BatchContract
    window: int  # micro-batches that the server may send ahead of the loop
    start_timeout_s: float = 540.0  # for all readers to meet


@dataclass(frozen=True, slots=True)
class Agreement:
    """Terms that a WELCOME brought."""

    contract: ResolvedContract  # the server's
    rebuilder: Rebuilder = field(compare=False)  # by that contract, for this rank
    num_microbatches: int  # of a step and rank
    warnings: tuple[Violation, ...]


@dataclass(slots=True)
class ReaderProgress:
    """Place of one reader in its stream, the snapshots it holds, and what the server has told it."""

    identity: Identity
    start: Position = ORIGIN  # where this process began
    attempt: bytes = NO_ATTEMPT
    fingerprint: bytes = b""  # of the stream; empty until a WELCOME or a loaded state names it
    position: Position = ORIGIN  # of the next micro-batch to hand out
    expected: Position = ORIGIN  # of the next one to receive
    last_digest: bytes = b""  # of the row that was handed out last
    snapshots: HeldSnapshots = field(default_factory=HeldSnapshots)
    agreed: Agreement | None = None
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S  # the server's, once welcomed
    waiting: Wait | None = None  # what the server said last, until something arrives
    released: bool = False  # behind the end: no other reader needs this one any more

    def __post_init__(self) -> None:
        self.position = self.expected = self.start

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """Rules whose break the server reported at the handshake and serves nevertheless."""
        return self.agreed.warnings if self.agreed is not None else ()

    # Messages ----------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Return a HELLO with all that a server needs to go on with this reader, or to begin."""
        who = self.identity
        return Hello(
            min_version=PROTOCOL_VERSION,
            max_version=PROTOCOL_VERSION,
            stream=who.stream,
            reader=who.reader,
            client=who.client,
            layout=who.layout,
            contract=who.contract,
            contract_digest=who.contract.digest(who.layout),
            attempt=self.attempt,
            start=self.start,
            position=self.position,
            snapshots=self.snapshots.refs(),
            last_digest=self.last_digest,
            window=who.window,
            start_timeout_s=who.start_timeout_s,
        )

    def ack(self, loop_idle_s: float) -> Ack:
        """Return the ACK of everything before ``position``; the loop asked last ``loop_idle_s`` seconds ago."""
        return Ack(stream=self.identity.stream, attempt=self.attempt, position=self.position, loop_idle_s=loop_idle_s)

    def agree(self, welcome: Welcome) -> None:
        """Take over what WELCOME says, and expect the next micro-batch to hand out."""
        identity, contract = self.identity, welcome.contract
        self.agreed = Agreement(
            contract,
            Rebuilder(contract, identity.layout, identity.reader.context),
            contract.num_microbatches(identity.layout),
            welcome.warnings,
        )
        self.attempt, self.fingerprint, self.keep_alive_s = welcome.attempt, welcome.fingerprint, welcome.keep_alive_s
        self.expected, self.waiting = self.position, None

    # The loop ----------------------------------------------------------------------------------------

    def rebuild(self, delivered: Deliver) -> MicroBatch:
        """Return a micro-batch with its numpy arrays, made of what arrived.

        Raises ``ProtocolError`` where the payload does not fit its header, or no WELCOME has come.
        """
        if self.agreed is None:
            raise ProtocolError("BATCH before WELCOME")
        return self.agreed.rebuilder.rebuild(delivered.body, memoryview(delivered.payload))

    def hand_out(self, position: Position, digest: bytes) -> None:
        """Go behind the micro-batch at ``position``, whose row has this digest.

        Raises ``ProtocolError`` where another one is next.
        """
        if self.agreed is None:
            raise ProtocolError("no micro-batch can be handed out before WELCOME")
        if position != self.position:
            raise ProtocolError(f"{tuple(position)} was handed out where {tuple(self.position)} is next")
        self.last_digest, self.position = digest, position.after(self.agreed.num_microbatches)

    def hand_out_end(self) -> bool:
        """Go behind an END, which counts as a step of one; return whether another pass follows."""
        self.position = Position(self.position.step + 1, 0)
        self.last_digest = b""
        return self.position.step in self.snapshots  # END brings the next one where another pass follows

    # A checkpoint ------------------------------------------------------------------------------------

    def saved(self, step: int | None, owed: Position | None, *, ended: bool) -> FeedState:
        """Return where the loop stands, or the boundary before an earlier ``step`` that is still held.

        It stands at the first that is ``owed`` to it, where there is one: handed out, and not given to it.

        Raises ``ContractError`` where that step was not reached or is held no more.
        """
        # END is no micro-batch: whoever resumes at the end asks for it again.
        here = Position(self.position.step - 1, 0) if ended else self.position
        taken = here if owed is None else min(owed, here)
        at = taken if step is None else Position(step, 0)
        snapshot = self.snapshots.get(at.step, b"")
        if not ORIGIN <= at <= taken or (at.step and not snapshot):
            held = ", ".join(str(known) for known in sorted(self.snapshots) if known <= taken.step) or "none"
            raise ContractError(f"no state before step {at.step} is held at {tuple(taken)}; held before steps: {held}")
        # Whether the server was met by now may differ from rank to rank; the state does not.
        return FeedState(self.identity.stream, at, self.fingerprint if at != ORIGIN else b"", snapshot)

    def load(self, saved: FeedState) -> None:
        """Begin at ``saved`` instead of the start, in an attempt that is still to form."""
        self.start = self.position = self.expected = saved.position
        self.snapshots = HeldSnapshots({saved.position.step: saved.snapshot} if saved.snapshot else None)
        self.attempt, self.fingerprint = NO_ATTEMPT, saved.fingerprint

    def require_fresh(self) -> None:
        """Raise ``ContractError`` where it is too late to load a state."""
        if self.position != ORIGIN:
            raise ContractError(
                f"load_state_dict with stream {self.identity.stream!r} at {tuple(self.position)}: a state is loaded "
                "once, before the first micro-batch; make a new Feed"
            )
