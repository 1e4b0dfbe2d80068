"""The ends that ``transport`` compares: a raw socket, plain ZeroMQ, and ours, each a sender and a receiver.

Every sender is one thread and every receiver a process of its own. All send the same bytes: the header of a
BATCH and its payload, to each receiver at most ``Case.window`` messages beyond what it has acknowledged.
"""

from __future__ import annotations

import resource
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import msgspec
import numpy as np
import zmq

from packhorse import BatchContract, Feed, MicroBatch, ParallelLayout
from packhorse.codec.views import view_arrays
from packhorse.contract.batch_contract import ResolvedContract, resolve
from packhorse.contract.position import ORIGIN, Position
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Fail, Finish
from packhorse.protocol.effects import Effect as ClientEffect
from packhorse.protocol.effects import Send as Say
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.rows.row import Row
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.transport.key_files import ClientKey
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.wire.messages import Batch, BatchBody, Hello, decode, encode
from packhorse_service.framing import FramedStep, View, ViewKey
from packhorse_service.protocol.admission import Limits
from packhorse_service.protocol.effects import Effect, Make, Send
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of
from packhorse_service.server.authentication import ALL, Client, Clients, Curve, Ranks
from packhorse_service.server.inbound import InboundFilter
from packhorse_service.server.router import Router

__all__ = ["ENDS", "Case", "Ends", "Measured"]

WAIT_S = 60.0  # longer, and something is wrong
WARM_UP = 10  # one message in so many is not measured
ZERO_COPY_BYTES = 64 << 10  # below, pyzmq is faster with a copy
MEAN_LENGTH = 500
VOCABULARY = 50_000  # ids of 16 bits
ATTEMPT = b"attempt!"


@dataclass(frozen=True)
class Case:
    """One cell of a table."""

    kind: str
    transport: str  # tcp or ipc
    size: int  # bytes of the payload, nearly
    ranks: int
    messages: int  # to each
    folder: str  # for the files of ipc sockets
    keys: tuple[bytes, bytes] | None = None  # public and secret, of both ends: CURVE

    @property
    def window(self) -> int:
        """Messages in flight to a receiver: 8 MiB of them, 4 at least."""
        return min(max(4, (8 << 20) // self.size), 64)

    @property
    def grant(self) -> int:
        """A receiver acknowledges so many messages at once, where nothing decides otherwise."""
        return max(1, self.window // 4)

    @property
    def messages_a_step(self) -> int:
        return self.window

    @property
    def listen(self) -> str:
        return "tcp://127.0.0.1:*" if self.transport == "tcp" else f"ipc://{self.folder}/{self.kind.split()[0]}"

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(data=self.ranks)

    @property
    def curve(self) -> Curve | None:
        """Of our server."""
        if self.keys is None:
            return None
        public, secret = self.keys
        everybody = Client("trainers", public, Ranks(ALL, ()))
        return Curve(Clients(Path("clients.toml"), {public: everybody}), public, secret)

    @property
    def client_key(self) -> ClientKey | None:
        """Of our clients."""
        return None if self.keys is None else ClientKey(Path("trainers.key"), self.keys[0], self.keys[0], self.keys[1])

    @cached_property
    def contract(self) -> ResolvedContract:
        steps = self.messages_a_step * self.ranks
        width = self.size * 15 // 32  # 2 bytes for an id, a bit for its mask
        return resolve(BatchContract(), self.layout, seq_length=width, global_batch_size=steps, vocab_size=VOCABULARY)

    @cached_property
    def view(self) -> View:
        """A row of samples as one rank gets it."""
        width = self.contract.seq_length
        random = np.random.default_rng(0)
        offsets = np.array([0, *range(MEAN_LENGTH, width - 1, MEAN_LENGTH), width], np.int32)
        ids = random.integers(0, VOCABULARY, width).astype(np.uint32)
        mask = (ids % 4 > 0).astype(np.uint8)
        row = Row(ids, ids[offsets[1:] - 1], mask, offsets, offsets)
        view = view_arrays(row, self.contract, self.layout, 0)
        body = BatchBody(
            step=0,
            index=0,
            num_tokens=row.num_tokens,
            num_loss_tokens=row.num_loss_tokens,
            local_loss_tokens=view.loss_tokens,
            step_tokens=row.num_tokens,
            step_loss_tokens=row.num_loss_tokens,
            max_seqlen=int(np.diff(offsets).max()),
            slots=view.slots,
            filler=False,
            row_digest=bytes(16),
            arrays=view.table,
        )
        return View(body, view.payload)

    @cached_property
    def header(self) -> bytes:
        return encode(Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=self.view.body))


@dataclass
class Measured:
    """What one process did, from a tenth of its messages on: clock readings are comparable between processes."""

    begin_s: float = 0.0
    end_s: float = 0.0
    cpu_s: float = 0.0  # user and system, all threads

    def begin(self) -> None:
        self.begin_s, self.cpu_s = time.monotonic(), _cpu_s()

    def end(self) -> Measured:
        self.end_s, self.cpu_s = time.monotonic(), _cpu_s() - self.cpu_s
        return self


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


Announce = Callable[[str], None]  # where the receivers connect


@dataclass(frozen=True)
class Ends:
    send: Callable[[Case, Announce], Measured]
    receive: Callable[[Case, str, int], Measured]  # endpoint and rank


# Raw socket -------------------------------------------------------------------------------------------


@dataclass
class Outlet:
    """One connection of the raw sender."""

    sock: socket.socket
    left: int
    credit: int
    offset: int = 0  # into the message that is being sent

    def pump(self, message: tuple[memoryview, memoryview]) -> bool:
        """Send one message, or what the kernel takes of it; whether there may be more to send at once."""
        if not (self.left and self.credit):
            return False
        header, payload = message
        skipped = min(self.offset, len(header))
        parts = [header[skipped:], payload[self.offset - skipped :]]
        try:
            self.offset += self.sock.sendmsg(parts)
        except BlockingIOError:
            return False
        if self.offset == len(header) + len(payload):
            self.offset, self.left, self.credit = 0, self.left - 1, self.credit - 1
        return True


def send_raw(case: Case, announce: Announce) -> Measured:
    message = (memoryview(case.header), memoryview(case.view.payload))
    with _listening(case) as listener:
        host = listener.getsockname()
        announce(f"{host[0]}:{host[1]}" if case.transport == "tcp" else str(host))
        outlets = [
            Outlet(_connected(listener.accept()[0], case), case.messages, case.window) for _ in range(case.ranks)
        ]
    poller = select.epoll()
    by_file = {outlet.sock.fileno(): outlet for outlet in outlets}
    for outlet in outlets:
        outlet.sock.setblocking(False)
        poller.register(outlet.sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
    measured, total, begun = Measured(), case.messages * case.ranks, False
    while any(outlet.left or outlet.credit < case.window for outlet in outlets):
        left = sum(outlet.left for outlet in outlets)
        if not begun and left <= total - total // WARM_UP:
            measured.begin()
            begun = True
        moved = [outlet.pump(message) for outlet in outlets]
        if not any(moved):
            for number, events in poller.poll(WAIT_S):
                if events & select.EPOLLIN:
                    outlet = by_file[number]
                    outlet.credit += case.grant * len(outlet.sock.recv(4096))
    for outlet in outlets:
        outlet.sock.close()
    poller.close()
    return measured.end()


def receive_raw(case: Case, endpoint: str, _rank: int) -> Measured:
    buffer = bytearray(len(case.header) + len(case.view.payload))
    whole, measured = memoryview(buffer), Measured()
    with _dialled(case, endpoint) as sock:
        for number in range(1, case.messages + 1):
            filled = 0
            while filled < len(buffer):
                got = sock.recv_into(whole[filled:])
                assert got, "the sender has gone"
                filled += got
            if number == case.messages // WARM_UP:
                measured.begin()
            if number % case.grant == 0:
                sock.send(b"\0")
        measured.end()
    return measured


def _listening(case: Case) -> socket.socket:
    if case.transport == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{case.folder}/raw{time.monotonic_ns()}")
    listener.listen(case.ranks)
    return listener


def _connected(sock: socket.socket, case: Case) -> socket.socket:
    if case.transport == "tcp":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@contextmanager
def _dialled(case: Case, endpoint: str) -> Iterator[socket.socket]:
    if case.transport == "tcp":
        host, port = endpoint.split(":")
        sock = _connected(socket.create_connection((host, int(port)), WAIT_S), case)
        sock.settimeout(None)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(endpoint)
    with sock:
        yield sock


# Plain ZeroMQ -----------------------------------------------------------------------------------------


def send_plain(case: Case, announce: Announce) -> Measured:
    header, payload = case.header, case.view.payload
    copy = len(payload) < ZERO_COPY_BYTES
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            router.setsockopt(option, 0)
        if case.keys:
            router.curve_publickey, router.curve_secretkey = case.keys
            router.curve_server = True
        router.bind(case.listen)
        announce(router.getsockopt_string(zmq.LAST_ENDPOINT))
        credit: dict[bytes, int] = {}
        left: dict[bytes, int] = {}
        measured, sent = Measured(), 0
        done = 0
        while done < case.ranks:
            assert router.poll(int(WAIT_S * 1000)), "no receiver asks"
            while router.poll(0):
                peer, granted = router.recv_multipart()
                done += not granted
                credit[peer] = credit.get(peer, 0) + int.from_bytes(granted, "big")
                left.setdefault(peer, case.messages)
            for peer, room in credit.items():
                for _ in range(min(room, left[peer])):
                    router.send(peer, zmq.SNDMORE)
                    router.send(header, zmq.SNDMORE)
                    router.send(payload, 0, copy)
                    sent += 1
                    if sent == case.messages * case.ranks // WARM_UP:
                        measured.begin()
                left[peer] -= min(room, left[peer])
                credit[peer] = 0
        return measured.end()


def receive_plain(case: Case, endpoint: str, _rank: int) -> Measured:
    measured = Measured()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVHWM, 0)
        if case.keys:
            dealer.curve_publickey, dealer.curve_secretkey = case.keys
            dealer.curve_serverkey = case.keys[0]
        dealer.connect(endpoint)
        dealer.send(case.window.to_bytes(2, "big"))
        for number in range(1, case.messages + 1):
            _, payload = dealer.recv_multipart(copy=False)
            assert len(payload.buffer) == len(case.view.payload)
            if number == case.messages // WARM_UP:
                measured.begin()
            if number % case.grant == 0 and number < case.messages:
                dealer.send(case.grant.to_bytes(2, "big"))
        measured.end()
        dealer.send(b"")
        dealer.linger = int(WAIT_S * 1000)
    return measured


# Ours -------------------------------------------------------------------------------------------------


@dataclass
class Serving:
    """The server's half without its pipeline: every step holds the same payload."""

    session: StreamSession
    router: Router
    inbound: InboundFilter
    steps: list[FramedStep]
    measured: Measured = field(default_factory=Measured)

    def run(self) -> Measured:
        self._carry_out(self.session.warm_up())
        deadline = time.monotonic() + WAIT_S
        while not self.session.done:
            polled = self.router.wait(200)
            now = time.monotonic()
            assert now < deadline, "the readers do not come to an end"
            if polled.connections:
                self.inbound.track_connections(now)
            for heard in self.inbound.receive(now):
                self._carry_out(self.session.receive(heard.peer, heard.message, heard.extra, now))
                if isinstance(heard.message, Hello):
                    self.inbound.hello_accepted(heard.connection)
            self._carry_out(self.session.tick(now))
        return self.measured.end()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message, extra):
                    self.inbound.send(peer, [encode(message), *extra])
                case Make(generation, step):
                    self._carry_out(self.session.made(generation, self._step(step), time.monotonic()))

    def _step(self, number: int) -> FramedStep | None:
        if number == max(1, len(self.steps) // WARM_UP):
            self.measured.begin()
        return self.steps[number] if number < len(self.steps) else None


def framed(case: Case) -> list[FramedStep]:
    """The steps of a case, which another thread would have framed: every view has a header of its own."""
    keys = [ViewKey(data, 0) for data in range(case.ranks)]
    return [
        FramedStep(number, b"snapshot" * 128, _no_other_view, {key: _views(case, number) for key in keys})
        for number in range(case.messages // case.messages_a_step)
    ]


def _views(case: Case, step: int) -> tuple[View, ...]:
    view = case.view
    return tuple(
        View(msgspec.structs.replace(view.body, step=step, index=index), view.payload)
        for index in range(case.messages_a_step)
    )


def _no_other_view(key: ViewKey) -> tuple[View, ...]:
    raise AssertionError(f"nobody reads {key}")


def send_ours(case: Case, announce: Announce) -> Measured:
    spec = StreamSpec(
        stream="train",
        layout=case.layout,
        contract=case.contract,
        fingerprint=bytes(16),
        readers=readers_of(case.layout),
    )
    steps = framed(case)
    router = Router(case.listen, curve=case.curve)
    inbound = InboundFilter(router, Limits.for_readers(case.ranks), spec.stream)
    announce(router.endpoint)
    try:
        return Serving(StreamSession(spec), router, inbound, steps).run()
    finally:
        router.close()


@dataclass
class Reading:
    """The client's half in one thread; ``rebuild`` where its tensors are made too."""

    case: Case
    session: ClientSession
    dealer: Dealer
    queue: ReadyQueue[MicroBatch]  # counts what was taken, and says when to acknowledge, as in ``Feed``
    rebuild: bool
    taken: int = 0
    measured: Measured = field(default_factory=Measured)

    def run(self) -> Measured:
        deadline = time.monotonic() + WAIT_S
        while self.session.state is not State.ENDED:
            polled = self.dealer.wait(1.0)
            assert time.monotonic() < deadline, "the end does not come"
            if polled.connections:
                self._follow()
            for frames in self.dealer.messages():
                self._carry_out(self.session.receive(*decode(frames)))
        self._acknowledge()
        self.dealer.linger()
        self.dealer.send([encode(self.session.bye())])
        return self.measured

    def _follow(self) -> None:
        for event in self.dealer.events():
            if event is ConnectionEvent.UP:
                self._carry_out(self.session.connected())

    def _acknowledge(self) -> None:
        self.queue.unacknowledged = 0
        self.dealer.send([encode(self.session.ack(0.0))])

    def _carry_out(self, effects: list[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Say(message, extra):
                    self.dealer.send([encode(message), *extra])
                case Deliver(body, _):
                    if self.rebuild:
                        self.session.progress.rebuild(effect)
                    self.session.handed_out(Position(body.step, body.index), body.row_digest)
                    self.taken += 1
                    self.queue.unacknowledged += 1
                    if self.taken == self.case.messages // WARM_UP:
                        self.measured.begin()
                    if self.queue.ack_due:
                        self._acknowledge()
                case Finish():
                    self.measured.end()
                    self.session.end_handed_out()
                case Fail(error):
                    raise error


def receive_ours(case: Case, endpoint: str, rank: int, *, rebuild: bool = False) -> Measured:
    identity = Identity(
        stream="train",
        reader=case.layout.coordinates(rank),
        client=secrets.token_bytes(16),
        layout=case.layout,
        contract=BatchContract(),
        window=case.window,
    )
    dealer = Dealer(endpoint, key=case.client_key)
    try:
        session = ClientSession(ReaderProgress(identity))
        return Reading(case, session, dealer, ReadyQueue(session), rebuild).run()
    finally:
        dealer.close()


def receive_feed(case: Case, endpoint: str, rank: int) -> Measured:
    """The whole client: the loop in one thread, the socket in another."""
    measured = Measured()
    with Feed(endpoint, layout=case.layout, rank=rank, window=case.window, arrays="numpy") as feed:
        for taken, _ in enumerate(feed, start=1):
            if taken == case.messages // WARM_UP:
                measured.begin()
        return measured.end()


ENDS: dict[str, Ends] = {
    "raw socket": Ends(send_raw, receive_raw),
    "plain ZeroMQ": Ends(send_plain, receive_plain),
    "ours": Ends(send_ours, receive_ours),
    "ours, rebuilt": Ends(send_ours, partial(receive_ours, rebuild=True)),
    "ours, Feed": Ends(send_ours, receive_feed),
}
