"""One stream of a server: its half of the protocol and the thread that makes its steps, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from packhorse.errors import ConfigError, ContractError, PackhorseError, ProtocolError, SourceError, TransportError
from packhorse.wire.messages import encode
from packhorse_service.mixing.source_counts import describe_counts
from packhorse_service.protocol.effects import Effect, Made, Make, NotRestored, Restore, Restored, Send
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec
from packhorse_service.server.producer import Failed, Producer, Result

__all__ = ["SendFrames", "ServedStream", "with_text"]

log = logging.getLogger("packhorse.server")

HELD = "; a job that begins here fails with this, and one that resumes elsewhere may go on: waiting for its readers"

# (peer, frames) -> whether there still is such a connection
SendFrames = Callable[[bytes, Sequence[bytes | bytearray | memoryview]], bool]


class ServedStream:
    """Session and producer of one stream. ``label`` begins its log lines, where there are several streams."""

    def __init__(self, spec: StreamSpec, producer: Producer, send: SendFrames, label: str = "") -> None:
        self.name = spec.stream
        self.label = label
        self.session = StreamSession(spec)
        self.producer = producer
        self._send = send
        self._error: PackhorseError | None = None
        self.failed_s: float | None = None  # when its data failed last

    @property
    def error(self) -> PackhorseError | None:
        """Reason why the stream cannot go on, of the class that tells whose fault it is; ``None`` while it can."""
        if self.session.failure is None:
            return None
        return self._error or ContractError(self.session.failure)

    def tick(self, now: float, closed: Iterable[bytes]) -> None:
        """Do what time alone brings about; the connections of the peers ``closed`` have ended."""
        for peer in closed:
            self.session.lost(peer)
        self.carry_out(self.session.tick(now))

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Send what the session wants sent, and hand the producer its requests."""
        for effect in effects:
            match effect:
                case Send(peer, message, extra):
                    if not self._send(peer, [encode(message), *extra]):
                        self.session.lost(peer)
                case Make() | Restore():
                    self.producer.requests.put(effect)

    def take_results(self, now: float) -> None:
        """Give the session whatever the producer has made since."""
        while not self.producer.results.empty():
            self._take(self.producer.results.get(), now)

    def _take(self, result: Result, now: float) -> None:
        match result:
            case Made(generation, step, snapshot_after):
                self.carry_out(self.session.made(generation, step, now, snapshot_after))
            case Restored(generation):
                self.carry_out(self.session.restored(generation, now))
            case NotRestored(generation, message):
                self.carry_out(self.session.not_restored(generation, message, now))
            case Failed(generation, error):
                self._error, self.failed_s = error, now
                self.carry_out(self.session.not_made(generation, str(error), now))
                held = self.session.attempt.held_failure is not None
                log.error("%s%s%s", self.label, error, HELD if held else "")

    def fail(self, error: PackhorseError, now: float) -> None:
        """End the stream; its readers are told the error's text."""
        self._error, self.failed_s = error, self.failed_s or now
        self.carry_out(self.session.fail(str(error), now))

    def end_held_failure(self, now: float, grace_s: float) -> None:
        """End the stream where its first step could not be made and nobody has come since who might need another."""
        if self.session.failing.held and self._error is not None and now - (self.failed_s or now) > grace_s:
            self.fail(self._error, now)

    def raise_failure(self) -> None:
        """Raise the error of the stream, where its data has failed; that of a first step that nobody needed, too."""
        held = self.session.attempt.held_failure is not None
        error = self._error if held else self.error
        if error is not None:
            raise error

    def stop(self) -> None:
        """Have the producer end behind what it is doing."""
        self.producer.requests.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the producer, if it was ever started, and log what became of its sources' samples."""
        if self.producer.ident is None:
            return
        self.producer.join(timeout=timeout_s)
        for line in describe_counts(self.producer.counts):
            log.info("%s%s", self.label, line)


BRANCHES = (ConfigError, ContractError, SourceError, ProtocolError, TransportError)


def with_text(error: PackhorseError, text: str) -> PackhorseError:
    """Return an error of the same branch of the tree in ``packhorse.errors``, which says ``text``."""
    kind = next((branch for branch in BRANCHES if isinstance(error, branch)), PackhorseError)
    return kind(text)
