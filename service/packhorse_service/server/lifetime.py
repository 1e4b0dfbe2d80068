"""When a server ends: with the readers of its first stream, a while behind its end, or once it has failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto

from packhorse.errors import PackhorseError
from packhorse_service.protocol.attempt import Phase
from packhorse_service.server.served_stream import ServedStream, with_text

__all__ = ["END_GRACE_S", "FAILURE_GRACE_S", "Ending", "Lifetime"]

log = logging.getLogger("packhorse.server")

END_GRACE_S = 60.0
FAILURE_GRACE_S = 60.0


class Ending(Enum):
    """Way in which a server that did not fail came to its end."""

    ALL_LEFT = auto()  # every reader said BYE
    STOPPED = auto()  # it was asked to
    SILENT = auto()  # all was delivered, and not every reader said BYE within the grace


class Lifetime:
    """Lifetime of a server that is there for its ``first`` stream; readers of ``further`` ones come and go."""

    def __init__(
        self, first: ServedStream, further: Sequence[ServedStream], end_grace_s: float, failure_grace_s: float
    ) -> None:
        self._first = first
        self._further = further
        self._end_grace_s = end_grace_s
        self._failure_grace_s = failure_grace_s
        self._failed_s: float | None = None

    @property
    def all_left(self) -> bool:
        """Every reader of the first stream has said BYE."""
        return self._first.session.done

    def ending(self, now: float) -> Ending | None:
        """Return how the server has ended, if it has, besides by the BYE of every reader.

        Raises the error of the first stream once every reader has heard of it, or should have.
        """
        self._first.end_held_failure(now, self._failure_grace_s)
        error = self._first.error
        if error is not None:
            self._fail(error, now)
        if self._first.session.phase is Phase.ENDED and now - self._last_needed_s > self._end_grace_s:
            log.warning("not every reader has said BYE %.0f s after the end; leaving", self._end_grace_s)
            return Ending.SILENT
        return None

    @property
    def _last_needed_s(self) -> float:
        """Time of the first stream's end; of the last message to another, whose reader may evaluate behind it."""
        heard = [stream.session.heard_s for stream in self._further]
        return max([self._first.session.attempt.phase_since_s, *heard])

    def _fail(self, error: PackhorseError, now: float) -> None:
        if self._failed_s is None:
            self._failed_s = now if self._first.failed_s is None else self._first.failed_s
            for stream in self._further:
                if stream.error is None:
                    text = f"stream {self._first.name!r} has failed, and the server ends: {error}"
                    stream.fail(with_text(error, text), now)
        left = all(stream.session.failing.heard for stream in (self._first, *self._further))
        if (left and self._first.session.failing.told_all) or now - self._failed_s > self._failure_grace_s:
            raise error

    def raise_failure(self) -> None:
        """Raise the error of the first stream, where its data has failed: a server that is stopped then has failed."""
        self._first.raise_failure()

    def raise_further(self) -> None:
        """Raise the error of a further stream, where one has failed."""
        for stream in self._further:
            if stream.error is not None:
                raise with_text(stream.error, f"{stream.label}{stream.error}") from stream.error
