"""Where a window of steps began, as a snapshot inside it says."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DIGEST_BYTES", "WindowPosition"]

DIGEST_BYTES = 8


class WindowPosition(NamedTuple):
    """Position of a stream inside a balance window, and the settings by which its packs are made and assigned."""

    offset: int  # steps of the window that lie before; 0 outside of any
    steps: int  # that the window has: fewer than ``window`` at the end of a finite stream
    window: int  # as configured
    packs: int  # a step
    digest: bytes  # of the settings by which packs are made and assigned

    @property
    def possible(self) -> bool:
        return self.offset == self.steps == 0 or 0 < self.offset < self.steps <= self.window
