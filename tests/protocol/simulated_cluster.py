"""Servers, reader processes and the connections between them, without sockets: the real sessions under any fault.

A connection does what one of ROUTER and DEALER does (libzmq 4.3), and nothing else:

* frames arrive in order and once; where it breaks, the tail of what is on it is lost, each way;
* what the server has received by then is still read, before, between or behind the frames of the reader's next
  connection: this is how frames are reordered at a reconnect;
* what the server sends on a broken connection is lost in silence until it notices, then refused (``lost``);
* a reader drops what is left of one connection before it says HELLO on the next.

A frame is never sent twice by a connection: duplicates are what the protocol itself sends again. Every micro-batch
that a loop takes is compared with that of an undisturbed run when it is taken.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.batch_contract import BatchContract, ResolvedContract, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import PackhorseError
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Fail, Finish, Forget, Reconnect, Send
from packhorse.protocol.effects import Effect as ClientEffect
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.rows.row import Row
from packhorse.wire.messages import Ack, Batch, End, Frames, Message, Wait, decode, encode
from packhorse_service.framing import FramedStep, View, frame_step, view_key
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Effect, Make, Restore
from packhorse_service.protocol.effects import Send as ServerSend
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of

__all__ = ["Connection", "Process", "Seen", "Server", "Shape", "SimulatedCluster"]

SEQ_LENGTH = 8
STEPS = 4
NUM_MICROBATCHES = 2
STEPS_AHEAD = 2
WINDOW = 2
REJOIN_AFTER_S = 6.0
FINGERPRINT = bytes(16)

Envelope = tuple[Message, Frames] | list[bytes]  # as objects, or as they travel


@dataclass(repr=False)
class Shape:
    """A job: its layout, and the stream it reads, made once and shared by every schedule."""

    layout: ParallelLayout
    partition: Partition | None = None
    _framed: dict[int, FramedStep] = field(default_factory=dict)

    @cached_property
    def declared(self) -> BatchContract:
        return BatchContract(partition=self.partition)

    @cached_property
    def contract(self) -> ResolvedContract:
        rows = self.layout.data * NUM_MICROBATCHES
        return resolve(self.declared, self.layout, seq_length=SEQ_LENGTH, global_batch_size=rows, vocab_size=1000)

    @cached_property
    def readers(self) -> list[Coordinates]:
        return sorted(readers_of(self.layout))

    def framed(self, step: int) -> FramedStep:
        """This step as any server of the stream makes it: its ids name step, rank and index."""
        if step not in self._framed:
            rows = [[_row(step, rank, index) for index in range(NUM_MICROBATCHES)] for rank in range(self.layout.data)]
            snapshot = struct.pack("<Q", step + 1)
            self._framed[step] = frame_step(step, rows, snapshot, self.contract, self.layout, with_keys=False)
        return self._framed[step]

    def view(self, at: Coordinates, position: Position) -> View:
        """What an undisturbed run hands to this reader here."""
        return self.framed(position.step).views_of(view_key(at, self.contract, self.layout))[position.index]


def _row(step: int, rank: int, index: int) -> Row:
    tokens = np.full(SEQ_LENGTH, step * 100 + rank * 10 + index, np.uint32)
    offsets = np.array([0, SEQ_LENGTH], np.int32)
    return Row(tokens, np.array([1], np.uint32), np.ones(SEQ_LENGTH, np.uint8), offsets, offsets)


@dataclass
class Seen:
    """(state, event) pairs of both tables that were reached, and how many schedules ran."""

    client: set[tuple[State, type]] = field(default_factory=set)
    server: set[tuple[Phase, type]] = field(default_factory=set)
    schedules: int = 0


@dataclass(eq=False)
class Connection:
    """Between one process and one server; broken once, never mended."""

    peer: bytes
    server: Server
    up: deque[Envelope] = field(default_factory=deque)
    down: deque[Envelope] = field(default_factory=deque)
    broken: bool = False
    noticed: bool = True  # whether the server would be told that it is broken

    def cut(self, up: int = 0, down: int = 0, *, noticed: bool = True) -> None:
        """Break, keeping this many frames each way that have arrived already."""
        if not self.broken:
            self.broken, self.noticed = True, noticed
            self.up = deque(list(self.up)[:up])
            self.down = deque(list(self.down)[:down])


@dataclass(eq=False)
class Server:
    """One server process: its session, its connections, and the work its pipeline has not done yet."""

    session: StreamSession
    shape: Shape
    step: int = 0  # where its pipeline stands
    work: deque[Make | Restore] = field(default_factory=deque)
    connections: dict[bytes, Connection] = field(default_factory=dict)
    stalled: bool = False
    answers: dict[bytes, set[bytes]] = field(default_factory=dict)  # attempt -> clients that acknowledged it here

    def next_step(self) -> FramedStep | None:
        if self.step >= STEPS:
            return None
        self.step += 1
        return self.shape.framed(self.step - 1)


@dataclass(eq=False)
class Process:
    """One reader process: its session, and how far its loop is."""

    session: ClientSession
    cursor: Position = ORIGIN  # of the micro-batch its loop must be handed next
    connection: Connection | None = None
    ready: deque[Deliver] = field(default_factory=deque)
    finished: bool = False
    stalled: bool = False
    said_bye: bool = False  # said BYE
    error: PackhorseError | None = None
    told: Wait | None = None  # the last it heard

    def __repr__(self) -> str:
        at, session = self.session.progress.identity.reader, self.session
        return f"{at} {session.state.name} {tuple(session.position)} of {session.attempt.hex()}, {session.waiting}"

    @property
    def absent(self) -> bool:
        """Does nothing, now or for ever."""
        return self.stalled or self.said_bye or self.error is not None

    @property
    def at(self) -> Coordinates:
        return self.session.progress.identity.reader

    @property
    def over(self) -> bool:
        return self.error is not None or self.session.state is State.ENDED


class SimulatedCluster:
    """At most two servers, a process for each reader and zombies of earlier ones; a name that points to one server."""

    def __init__(self, shape: Shape, seen: Seen, *, wire: bool = False, start_timeout_s: float = 1e6) -> None:
        self.shape = shape
        self.seen = seen
        self.wire = wire  # whether messages are encoded and decoded on their way
        self.start_timeout_s = start_timeout_s
        self.now = 1000.0
        self.name = 0  # which server the endpoint's name points to
        self._names = 0
        self.servers: list[Server | None] = [None, None]
        self.abandoned: list[Connection] = []  # broken, and not read to the end by their servers
        self.processes = {at: self.new_process(at) for at in shape.readers}
        self.zombies: list[Process] = []
        # Whether a zombie had taken nothing: it is as good a reader as the one in its place, and may end it.
        self.rivals = False
        self.start_server(0)

    # Processes come and go ---------------------------------------------------------------------------

    def _new_name(self, size: int) -> bytes:
        self._names += 1
        return self._names.to_bytes(size, "big")

    def new_process(self, at: Coordinates) -> Process:
        identity = Identity(
            stream="train",
            reader=at,
            client=self._new_name(16),
            layout=self.shape.layout,
            contract=self.shape.declared,
            window=WINDOW,
            start_timeout_s=self.start_timeout_s,
        )
        return Process(ClientSession(ReaderProgress(identity)))

    def replace(self, at: Coordinates, state: FeedState | None = None, *, zombie: bool = False) -> Process:
        """Another process for this reader; the old one dies, or goes on as a zombie."""
        old = self.processes[at]
        if zombie:
            self.zombies.append(old)
            self.rivals |= old.session.position == old.session.progress.start
        else:
            self.disconnect(old)
        process = self.processes[at] = self.new_process(at)
        if state is not None:
            self.load(process, state)
        return process

    def load(self, process: Process, state: FeedState) -> None:
        """The loop loads a state before it takes anything."""
        if process.session.position == ORIGIN and process.error is None:
            self.client_effects(process, process.session.resume(state))
            process.cursor = state.position

    def start_server(self, slot: int, fingerprint: bytes = FINGERPRINT) -> Server:
        spec = StreamSpec(
            stream="train",
            layout=self.shape.layout,
            contract=self.shape.contract,
            fingerprint=fingerprint,
            readers=frozenset(self.shape.readers),
            steps_ahead=STEPS_AHEAD,
            rejoin_after_s=REJOIN_AFTER_S,
        )
        server = self.servers[slot] = Server(StreamSession(spec), self.shape)
        self.server_effects(server, server.session.warm_up())
        return server

    def kill_server(self, slot: int) -> None:
        server, self.servers[slot] = self.servers[slot], None
        if server is not None:
            for connection in server.connections.values():
                connection.cut(down=len(connection.down))

    @property
    def alive(self) -> list[Server]:
        return [server for server in self.servers if server is not None]

    @property
    def everybody(self) -> list[Process]:
        return [*self.processes.values(), *self.zombies]

    # Connections -------------------------------------------------------------------------------------

    def connect(self, process: Process, slot: int | None = None) -> bool:
        """The process notices that its connection is down, and has a new one, where the name points or pointed."""
        server = self.servers[self.name if slot is None else slot]
        before = process.connection
        if server is None or process.absent or (before is not None and not before.broken):
            return False
        self.disconnect(process)
        process.connection = Connection(self._new_name(5), server)
        server.connections[process.connection.peer] = process.connection
        self.client_effects(process, process.session.connected())
        return True

    def disconnect(self, process: Process, up: int = 1 << 30, *, noticed: bool = True) -> None:
        """The process closes its socket: this many frames have got through, and the rest is lost."""
        connection, process.connection = process.connection, None
        if connection is not None:
            connection.cut(up, noticed=noticed)
            connection.down.clear()
            if connection.up and connection.server in self.alive:
                self.abandoned.append(connection)

    def pass_on(self, process: Process, *, take: bool = False) -> None:
        """Everything between a process and its server is read."""
        while self.deliver_up(process.connection) or self.deliver_down(process) or (take and self.take(process)):
            pass

    def deliver_up(self, connection: Connection | None) -> bool:
        """The server reads one frame."""
        if connection is None or not connection.up or connection.server not in self.alive or connection.server.stalled:
            return False
        server = connection.server
        message, extra = _opened(connection.up.popleft())
        self.seen.server.add((server.session.phase, type(message)))
        if isinstance(message, Ack):
            known = server.session.attempt.readers.by_peer(connection.peer)
            if known is not None:
                server.answers.setdefault(message.attempt, set()).add(known.client)
        self.server_effects(server, server.session.receive(connection.peer, message, extra, self.now))
        return True

    def deliver_down(self, process: Process) -> bool:
        """The process reads one frame."""
        connection = process.connection
        if connection is None or not connection.down or process.stalled or process.said_bye:
            return False
        message, extra = _opened(connection.down.popleft())
        self.seen.client.add((process.session.state, type(message)))
        if isinstance(message, Wait):
            process.told = message
        self.client_effects(process, process.session.receive(message, extra))
        return True

    # Work and time -----------------------------------------------------------------------------------

    def produce(self, server: Server | None) -> bool:
        """The pipeline does one piece of its work."""
        if server is None or server.stalled or not server.work:
            return False
        match server.work.popleft():
            case Make(generation, _):
                self.server_effects(server, server.session.made(generation, server.next_step(), self.now))
            case Restore(generation, snapshot):
                server.step = 0 if snapshot is None else struct.unpack("<Q", snapshot)[0]
                self.server_effects(server, server.session.restored(generation, self.now))
        return True

    def take(self, process: Process) -> bool:
        """The loop asks once; whether it got something."""
        if process.absent:
            return False
        session = process.session
        if process.ready:
            self._check(process, process.ready[0])
            session.handed_out(process.cursor, process.ready.popleft().body.row_digest)
            process.cursor = process.cursor.after(NUM_MICROBATCHES)
        elif process.finished and session.state is not State.ENDED:
            assert process.cursor == Position(STEPS, 0), "the end is behind the last step"
            session.end_handed_out()
        else:
            return False
        self.acknowledge(process)
        return True

    def _check(self, process: Process, delivered: Deliver) -> None:
        """Consecutive, and byte for byte that of an undisturbed run."""
        expected = self.shape.view(process.at, process.cursor)
        assert delivered.body == expected.body
        assert delivered.payload == expected.payload
        if self.wire:
            payload, context = memoryview(delivered.payload), process.at.context
            rebuilt = Rebuilder(self.shape.contract, self.shape.layout, context).rebuild(delivered.body, payload)
            assert rebuilt.position == process.cursor
            if rebuilt.holds_whole_row:
                assert rebuilt.computed_digest() == rebuilt.row_digest

    def acknowledge(self, process: Process) -> None:
        if process.session.state in (State.STREAMING, State.ENDED):
            self._say(process, process.session.ack(0.0))

    def say_bye(self, process: Process) -> None:
        """The process leaves in order; nothing of it remains."""
        self._say(process, process.session.bye())
        self.disconnect(process)
        process.said_bye = True

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes for everybody who is not stalled."""
        self.now += seconds
        for server in self.alive:
            if not server.stalled:
                self.server_effects(server, server.session.tick(self.now))
        for process in self.everybody:
            if process.connection is not None and not process.connection.broken and not process.absent:
                self.client_effects(process, process.session.interval_passed())
                self.acknowledge(process)

    def round(self) -> None:
        """Everybody connects, everything is read, made and taken, and a second passes."""
        for process in self.everybody:
            self.connect(process)
        for _ in range(1000):
            if not any(list(self._moves())):
                break
        else:
            raise AssertionError("the cluster does not come to rest within a second")
        self.tick()

    def _moves(self) -> Iterator[bool]:
        for connection in self.abandoned:
            yield self.deliver_up(connection)
        for server in self.alive:
            yield self.produce(server)
        for process in self.everybody:
            yield self.deliver_up(process.connection)
            yield self.deliver_down(process)
            yield self.take(process)

    # Effects -----------------------------------------------------------------------------------------

    def server_effects(self, server: Server, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ServerSend):
                self._send(server, effect)
            else:
                server.work.append(effect)

    def _send(self, server: Server, effect: ServerSend) -> None:
        if isinstance(effect.message, (Batch, End)):
            answered = server.answers.get(effect.message.attempt, set())
            missing = {reader.client for reader in server.session.attempt.readers} - answered
            assert not missing, "only the server that every reader has answered serves"
        connection = server.connections.get(effect.peer)
        if connection is not None and not connection.broken:
            connection.down.append(self._sealed(effect.message, effect.extra))
        elif connection is None or (connection.noticed and not connection.up):
            server.connections.pop(effect.peer, None)
            server.session.lost(effect.peer)

    def client_effects(self, process: Process, effects: Sequence[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message, extra):
                    self._say(process, message, extra)
                case Deliver():
                    process.ready.append(effect)
                case Forget():
                    process.ready.clear()
                    process.finished = False
                case Finish():
                    process.finished = True
                case Reconnect():
                    self.disconnect(process, self._names % 3)
                case Fail(error):
                    process.error = error

    def _say(self, process: Process, message: Message, extra: Frames = ()) -> None:
        if process.connection is not None and not process.connection.broken:
            process.connection.up.append(self._sealed(message, extra))

    def _sealed(self, message: Message, extra: Frames) -> Envelope:
        return [encode(message), *(bytes(frame) for frame in extra)] if self.wire else (message, extra)


def _opened(envelope: Envelope) -> tuple[Message, Frames]:
    return decode(envelope) if isinstance(envelope, list) else envelope
