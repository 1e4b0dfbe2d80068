"""A simulated rank and its socket: what arrives goes to the rank, the effects that it returns are carried out."""

from __future__ import annotations

import selectors
import time
from dataclasses import dataclass

from packhorse.errors import PackhorseError
from packhorse.protocol.effects import Deliver, Effect, Fail, Finish, Forget, Reconnect, Send
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.wire.messages import Frames, decode, encode
from packhorse_service.loadtest.ranks.rank_counters import RebuiltMicroBatch
from packhorse_service.loadtest.ranks.simulated_rank import SimulatedRank
from packhorse_service.row_digests import verify_row_digest

__all__ = ["RankConnection"]


@dataclass(slots=True, eq=False)
class RankConnection:
    """Socket of one rank, registered with the selector of all of them. An error ends this rank alone."""

    number: int  # by which the selector names it
    rank: SimulatedRank
    dealer: Dealer
    selector: selectors.BaseSelector
    verify: bool  # compute the digest of each whole row again
    disconnects: int = 0
    _registered: tuple[int, ...] = ()  # file descriptors

    def begin(self) -> None:
        """Register the socket, which connects by itself from now on."""
        self._register()
        self.rank.begin(time.monotonic())

    def serve(self) -> None:
        """Pass on whatever the socket has: connection events, then messages."""
        try:
            for event in self.dealer.events():
                self._on_event(event)
            self._read()
        except PackhorseError as error:
            self.rank.fail(error)

    def tick(self) -> None:
        """Have the rank do what is due by now, on a new socket where the old one has given up."""
        try:
            if self.dealer.given_up:
                self._reconnect()
            self._carry_out(self.rank.tick(time.monotonic()))
            self._read()  # sending may have taken the news of a message from the selector
        except PackhorseError as error:
            self.rank.fail(error)

    def say_bye(self) -> None:
        """Send BYE, and have the socket deliver it before it closes."""
        self.dealer.linger()
        self._carry_out(self.rank.leave(time.monotonic()))

    def close(self) -> None:
        """Take the socket from the selector and close it."""
        self._unregister()
        self.dealer.close()

    def _register(self) -> None:
        self._unregister()
        self._registered = self.dealer.filenos()
        for fileno in self._registered:
            self.selector.register(fileno, selectors.EVENT_READ, self.number)

    def _unregister(self) -> None:
        for fileno in self._registered:
            self.selector.unregister(fileno)
        self._registered = ()

    def _on_event(self, event: ConnectionEvent) -> None:
        if event is ConnectionEvent.UP:
            self._carry_out(self.rank.came_up(time.monotonic()))
        else:
            self.disconnects += 1
            self.rank.went_down()

    def _read(self) -> None:
        for frames in self.dealer.messages():
            message, extra = decode(frames)
            size = sum(map(len, frames))
            self._carry_out(self.rank.receive(message, extra, time.monotonic()), size)

    def _carry_out(self, effects: list[Effect], size: int = 0) -> None:
        """Carry out effects in order; ``size``: bytes on the wire of the message that they follow from."""
        for effect in effects:
            match effect:
                case Send(message, extra):
                    self._send([encode(message), *extra])
                case Deliver():
                    rebuilt = self._rebuild(effect, size)
                    self._carry_out(self.rank.delivered(rebuilt, rebuilt.ready_s))
                case Finish():
                    self._carry_out(self.rank.delivered(None, time.monotonic()))
                case Forget():
                    pass  # the rank has, together with the transition
                case Reconnect():
                    self.rank.went_down()
                    self._reconnect()
                case Fail(error):
                    self.rank.fail(error)

    def _reconnect(self) -> None:
        self.dealer.reconnect()
        self._register()

    def _send(self, frames: Frames) -> None:
        if not self.dealer.send(frames):
            self.rank.went_down()  # the next connection begins with HELLO, which says it all again

    def _rebuild(self, effect: Deliver, size: int) -> RebuiltMicroBatch:
        """Do all that a real rank does with a frame, its tensors included; they are not kept."""
        rebuilt = self.rank.session.progress.rebuild(effect)
        shares = 1 if rebuilt.holds_whole_row else rebuilt.context_size
        return RebuiltMicroBatch(
            position=rebuilt.position,
            row_digest=rebuilt.row_digest,
            tokens=rebuilt.num_tokens,
            delivered=rebuilt.num_tokens / shares,
            filler=rebuilt.filler,
            wire_bytes=size,
            verified=self.verify and verify_row_digest(rebuilt),
            ready_s=time.monotonic(),
        )
