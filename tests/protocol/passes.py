"""The network of sessions with a stream that is read in passes: three steps and an END, again and again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import Rebuilder
from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.protocol.client_session import State
from packhorse.protocol.effects import Deliver, Finish, Forget
from packhorse.protocol.effects import Effect as ClientEffect
from packhorse.wire.messages import encode
from packhorse_service.framing import FramedStep, frame_step
from packhorse_service.protocol.effects import Effect, Make, Send
from tests.protocol.network import CONTRACT, LAYOUT, Client, Network, Server, Stream, row_of

__all__ = ["PASS_STEPS", "Client", "PassClient", "PassNetwork", "undisturbed_pass"]

PASS_STEPS = 3


class PassStream(Stream):
    """Every pass holds the same rows, at steps that go on counting."""

    def next_step(self) -> FramedStep | None:
        place = self.step % (PASS_STEPS + 1)
        if place == PASS_STEPS:
            return None
        rows = [[row_of(place, rank, index) for index in range(2)] for rank in range(LAYOUT.data)]
        self.step += 1
        return frame_step(self.step - 1, rows, self.snapshot(), CONTRACT, LAYOUT, with_keys=False)

    def begin_pass(self) -> bytes:
        self.step += 1
        return self.snapshot()

    def snapshot(self) -> bytes:
        return self.step.to_bytes(8, "little")


@dataclass
class PassServer(Server):
    stream: PassStream = field(default_factory=PassStream)

    def produce(self, network: Network) -> bool:
        """Do one piece of the pipeline's work."""
        if not self.work or not isinstance(self.work[0], Make):
            return super().produce(network)
        make = self.work.popleft()
        step = self.stream.next_step()
        behind = self.stream.begin_pass() if step is None else b""
        network.server_effects(self.session.made(make.generation, step, network.now, behind))
        return True


@dataclass
class PassClient(Client):
    """``got``: what its loop was handed in each pass, the one it is in last."""

    waiting: deque[MicroBatch | None] = field(default_factory=deque)  # None is END
    got: list[list[tuple[Position, bytes]]] = field(default_factory=lambda: [[]])
    passes: int = 2  # that its loop wants

    def take(self) -> bool:
        """The loop asks once; whether it got something."""
        if len(self.got) > self.passes or not self.waiting:
            return False
        micro_batch = self.waiting.popleft()
        if micro_batch is None:
            self.session.end_handed_out()
            self.got.append([])
        else:
            self.session.handed_out(micro_batch.position, micro_batch.row_digest)
            self.got[-1].append((micro_batch.position, micro_batch.computed_digest()))
        if self.session.state is State.STREAMING:
            self.to_server.append([encode(self.session.ack(0.0))])
        return True


class PassNetwork(Network):
    """Clients that read passes, of one server at a time."""

    clients: dict[Coordinates, PassClient]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.restart_server()

    def _new_client(self, at: Coordinates) -> PassClient:
        return PassClient(super()._new_client(at).session)

    def restart_server(self) -> None:
        for at in self.clients:
            self.cut(at, noticed=False)
        self.server = PassServer()
        self.server_effects(self.server.session.warm_up())

    def server_effects(self, effects: list[Effect]) -> None:
        """What is sent to a reader whose connection is gone arrives nowhere."""
        gone = [effect for effect in effects if isinstance(effect, Send) and not effect.peer]
        super().server_effects([effect for effect in effects if effect not in gone])

    def client_effects(self, client: Client, effects: list[ClientEffect]) -> None:
        assert isinstance(client, PassClient)
        for effect in effects:
            match effect:
                case Deliver(body, payload):
                    rank = client.session.progress.identity.reader.context
                    client.waiting.append(Rebuilder(CONTRACT, LAYOUT, rank).rebuild(body, memoryview(payload)))
                case Forget():
                    client.waiting.clear()
                case Finish():
                    client.waiting.append(None)
                case _:
                    super().client_effects(client, [effect])


def undisturbed_pass(at: Coordinates, number: int) -> list[tuple[Position, bytes]]:
    """(position, row digest) of everything this reader is handed in a pass of a run without faults."""
    first = number * (PASS_STEPS + 1)
    return [
        (Position(first + step, index), row_of(step, at.data, index).digest(first + step, index))
        for step in range(PASS_STEPS)
        for index in range(2)
    ]
