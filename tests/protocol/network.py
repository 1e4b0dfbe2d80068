"""A server and its clients without sockets: the real sessions, joined by queues that can be cut.

The stream behind the server is real rows, made by a pure function of the step, so that what a client was
handed can be compared with what an undisturbed run hands out.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import BatchContract, ResolvedContract, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.errors import PackhorseError
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Fail, Finish, Forget, Reconnect, Send
from packhorse.protocol.effects import Effect as ClientEffect
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.rows.row import Row
from packhorse.wire.messages import Frames, Message, decode, encode
from packhorse_service.framing import FramedStep, frame_step
from packhorse_service.protocol.effects import Effect, Make, Restore
from packhorse_service.protocol.effects import Send as ServerSend
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of

SEQ_LENGTH = 8
STEPS = 6
LAYOUT = ParallelLayout(data=2)
CONTRACT = resolve(
    BatchContract(), LAYOUT, seq_length=SEQ_LENGTH, global_batch_size=4, vocab_size=1000
)  # two micro-batches a rank and step


def row_of(step: int, rank: int, index: int) -> Row:
    """The row at this place: ids that name it."""
    tokens = np.full(SEQ_LENGTH, step * 100 + rank * 10 + index, np.uint32)
    offsets = np.array([0, SEQ_LENGTH], np.int32)
    return Row(tokens, np.array([1], np.uint32), np.ones(SEQ_LENGTH, np.uint8), offsets, offsets)


class Stream:
    """The pipeline's stand-in: whole steps up to an end, from any snapshot."""

    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps
        self.step = 0

    def next_step(self) -> FramedStep | None:
        if self.step >= self.steps:
            return None
        rows = [[row_of(self.step, rank, index) for index in range(2)] for rank in range(LAYOUT.data)]
        self.step += 1
        snapshot = struct.pack("<Q", self.step)
        step = frame_step(self.step - 1, rows, snapshot, CONTRACT, LAYOUT, with_keys=False)
        step.provenance = lambda rank, index: f"samples of rank {rank}"
        return step

    def restore(self, snapshot: bytes | None) -> None:
        self.step = 0 if snapshot is None else struct.unpack("<Q", snapshot)[0]


def stream_spec(contract: ResolvedContract = CONTRACT) -> StreamSpec:
    return StreamSpec(
        stream="train",
        layout=LAYOUT,
        contract=contract,
        fingerprint=bytes(16),
        readers=readers_of(LAYOUT),
    )


@dataclass
class Server:
    """One server process: its session, and the work its pipeline has not done yet."""

    session: StreamSession = field(default_factory=lambda: StreamSession(stream_spec()))
    stream: Stream = field(default_factory=Stream)
    work: deque[Make | Restore] = field(default_factory=deque)
    broken: frozenset[int] = frozenset()  # steps whose data cannot be used

    def produce(self, network: Network) -> bool:
        """Do one piece of the pipeline's work."""
        if not self.work:
            return False
        match self.work.popleft():
            case Make(generation, step) if step in self.broken:
                network.server_effects(self.session.not_made(generation, f"step {step} is broken", network.now))
            case Make(generation, _):
                network.server_effects(self.session.made(generation, self.stream.next_step(), network.now))
            case Restore(generation, snapshot):
                network.server_effects(self._restored(generation, snapshot, network.now))
        return True

    def _restored(self, generation: int, snapshot: bytes | None, now: float) -> list[Effect]:
        try:
            self.stream.restore(snapshot)
        except struct.error:
            return self.session.not_restored(generation, "not a snapshot of this stream", now)
        return self.session.restored(generation, now)


@dataclass
class Client:
    """One reader process and what its loop has taken."""

    session: ClientSession
    ready: deque[MicroBatch] = field(default_factory=deque)
    taken: list[MicroBatch] = field(default_factory=list)
    finished: bool = False
    error: PackhorseError | None = None
    peer: bytes = b""
    to_server: deque[list[bytes]] = field(default_factory=deque)
    to_client: deque[list[bytes]] = field(default_factory=deque)

    def take(self) -> bool:
        """The loop asks once; whether it got something."""
        if self.ready:
            micro_batch = self.ready.popleft()
            self.session.handed_out(micro_batch.position, micro_batch.row_digest)
            self.taken.append(micro_batch)
        elif self.finished and self.session.state is not State.ENDED:
            self.session.end_handed_out()
        else:
            return False
        if self.session.state in (State.STREAMING, State.ENDED):
            self.to_server.append([encode(self.session.ack(0.0))])
        return True


class Network:
    """One server at a time and a client for each reader; connections are queues that can be cut."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.now = 0.0
        self._names = 0
        self.server = Server(broken=broken)
        self.clients = {at: self._new_client(at) for at in sorted(readers_of(LAYOUT))}
        self.server_effects(self.server.session.warm_up())

    def _name(self, size: int) -> bytes:
        self._names += 1
        return self._names.to_bytes(size, "big")

    def _new_client(self, at: Coordinates) -> Client:
        identity = Identity(
            stream="train", reader=at, client=self._name(16), layout=LAYOUT, contract=BatchContract(), window=2
        )
        return Client(ClientSession(ReaderProgress(identity)))

    # Faults and moves --------------------------------------------------------------------------------

    def connect(self, at: Coordinates) -> None:
        client = self.clients[at]
        if not client.peer:
            client.peer = self._name(5)
            self.client_effects(client, client.session.connected())

    def cut(self, at: Coordinates, *, noticed: bool) -> None:
        """The connection breaks and loses what is on it."""
        client = self.clients[at]
        if client.peer and noticed:
            self.server.session.lost(client.peer)
        client.peer = b""
        client.to_server.clear()
        client.to_client.clear()

    def restart_server(self) -> None:
        for at in self.clients:
            self.cut(at, noticed=False)
        self.server = Server()
        self.server_effects(self.server.session.warm_up())

    def restart_client(self, at: Coordinates) -> None:
        """The process dies and a new one begins from the start."""
        self.cut(at, noticed=True)
        self.clients[at] = self._new_client(at)

    def deliver_to_server(self, at: Coordinates) -> bool:
        client = self.clients[at]
        if not client.to_server:
            return False
        message, extra = decode(client.to_server.popleft())
        self.server_effects(self.server.session.receive(client.peer, message, extra, self.now))
        return True

    def deliver_to_client(self, at: Coordinates) -> bool:
        client = self.clients[at]
        if not client.to_client:
            return False
        message, extra = decode(client.to_client.popleft())
        self.client_effects(client, client.session.receive(message, extra))
        return True

    def turn(self, *takers: Coordinates) -> None:
        """A piece of the pipeline's work, a message each way for everybody, and these loops ask once."""
        self.server.produce(self)
        for at in self.clients:
            self.deliver_to_server(at)
            self.deliver_to_client(at)
        for at in takers:
            self.clients[at].take()

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.server_effects(self.server.session.tick(self.now))

    def settle(self, rounds: int = 1000) -> None:
        """Let everything go on undisturbed until nothing moves."""
        for _ in range(rounds):
            for at in self.clients:
                self.connect(at)
            moved = [self.server.produce(self)]
            for at, client in self.clients.items():
                moved += [self.deliver_to_server(at), self.deliver_to_client(at), client.take()]
            if not any(moved):
                return
        raise AssertionError("the network does not come to rest")

    # Effects -----------------------------------------------------------------------------------------

    def server_effects(self, effects: list[Effect]) -> None:
        by_peer = {client.peer: client for client in self.clients.values()} if hasattr(self, "clients") else {}
        for effect in effects:
            if isinstance(effect, ServerSend):
                receiver = by_peer.get(effect.peer)
                if receiver is None:
                    self.server.session.lost(effect.peer)
                else:
                    receiver.to_client.append(_frames(effect.message, effect.extra))
            else:
                self.server.work.append(effect)

    def client_effects(self, client: Client, effects: list[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message, extra):
                    client.to_server.append(_frames(message, extra))
                case Deliver(body, payload):
                    rank = client.session.progress.identity.reader.context
                    client.ready.append(Rebuilder(CONTRACT, LAYOUT, rank).rebuild(body, memoryview(payload)))
                case Forget():
                    client.ready.clear()
                    client.finished = False
                case Finish():
                    client.finished = True
                case Reconnect():
                    self.cut(client.session.progress.identity.reader, noticed=True)
                case Fail(error):
                    client.error = error


def _frames(message: Message, extra: Frames) -> list[bytes]:
    return [encode(message), *(bytes(frame) for frame in extra)]


def undisturbed(at: Coordinates, steps: int = STEPS) -> list[tuple[Position, bytes]]:
    """(position, row digest) of everything this reader is handed in a run without faults."""
    return [
        (Position(step, index), row_of(step, at.data, index).digest(step, index))
        for step in range(steps)
        for index in range(2)
    ]
