"""What a stream remembers of its draws, so that they can be made again: replay points, and what is packed.

A *replay point* is a place in the order, noted every so many draws. Of the points, those are kept that lie behind the
last one before the oldest piece that is not packed yet. A snapshot holds that first point, how many samples were drawn
since and at which lengths they were cut, and one bit for each piece of them: packed or pending. Where points are made
depends on the draws since the one before alone, so a stream makes the same ones, and the same snapshots, wherever it
was resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ContractError
from packhorse_service.mixing.order import DeferredCursor, OrderCursor
from packhorse_service.mixing.over_length import CutLength, CutLengthHistory
from packhorse_service.mixing.piece import Piece

__all__ = ["PIECES_LIMIT", "REPLAY_POINT_EVERY", "ReplayLog", "ReplayPoint", "StreamCursor"]

CHECKSUM_MASK = 0xFFFFFFFF
REPLAY_POINT_EVERY = 64  # draws, or as many as there are open shards: copying the order costs little by the draw
PIECES_LIMIT = 1 << 18  # drawn since the first replay point: 32 KiB of a snapshot


class ReplayPoint(NamedTuple):
    """A place in the order, and sums over all that was drawn before it. Of most points nobody asks for the order."""

    order: DeferredCursor
    draws: int = 0
    pieces: int = 0
    checksum: int = 0  # sum of the checksums of the blocks of all draws


class StreamCursor(NamedTuple):
    """Cursor from which a stream resumes: the order before the oldest pending piece, and what was packed since."""

    order: OrderCursor
    cut_lengths: Sequence[CutLength]  # of the draws since
    packed: npt.NDArray[np.uint8]  # [pieces drawn since] 1 = packed
    checksum: int = 0  # sum of the checksums of the blocks of all draws since, 32 bits of it


class ReplayLog:
    """Log of a stream's draws, from the last replay point before the oldest pending piece on."""

    def __init__(self, start: OrderCursor, open_shards: int, seq_length: int) -> None:
        """Begin where nothing is drawn. ``open_shards`` counts those of all sources; ``seq_length`` cuts samples."""
        self.points = deque([ReplayPoint(DeferredCursor(start.clone()))])
        self.draws = self.pieces = 0  # in all, and the pieces that they gave
        self.packed = bytearray()  # [pieces since the first point] 1 = packed
        self.at_limit = False  # as much was drawn since the first point as a snapshot can tell
        self.cut_lengths = CutLengthHistory(seq_length)
        self._checksum = 0  # of all draws
        self._interval = max(REPLAY_POINT_EVERY, open_shards)
        self._since_point = 0  # draws since the last point; those cut to several pieces count as so many

    @property
    def until_point(self) -> int:
        """Draws until the next replay point is due."""
        return self._interval - self._since_point

    def record(self, draws: int, pieces: int, checksum: int, weight: int) -> bool:
        """Note draws and their pieces, all pending; return whether a replay point is due behind them.

        ``checksum`` is the sum over the blocks drawn from. ``weight`` counts towards the next point: a draw for each
        sample, and for one that is cut as it is drawn as many as there are pieces.
        """
        self.draws += draws
        self.pieces += pieces
        self.packed.extend(bytes(pieces))
        self._checksum += checksum
        self._since_point += weight
        return self._since_point >= self._interval

    def add_point(self, order: DeferredCursor) -> None:
        """Note the place behind all draws."""
        self.points.append(ReplayPoint(order, self.draws, self.pieces, self._checksum))
        self._since_point = 0
        self.drop_passed_points()  # while all samples are dropped nothing is pending, and nobody packs anything

    def mark_packed(self, numbers: Iterable[int]) -> None:
        """Note that pieces, by number, are packed: they need not be drawn again."""
        packed, base = self.packed, self.points[0].pieces
        for number in numbers:
            packed[number - base] = 1
        self.drop_passed_points()

    def drop_passed_points(self) -> None:
        """Go on to the last replay point before which nothing is pending."""
        points, base = self.points, self.points[0].pieces
        front = self.packed.find(0)
        oldest = self.pieces if front < 0 else base + front
        while len(points) > 1 and points[1].pieces <= oldest:
            points.popleft()
        del self.packed[: points[0].pieces - base]
        since = max(self.pieces - points[0].pieces, self.draws - points[0].draws)
        self.at_limit = since + self._interval > PIECES_LIMIT

    def cursor(self) -> StreamCursor:
        """Return where to resume from now."""
        point = self.points[0]
        cut_lengths = self.cut_lengths.since(point.draws, self.draws)
        packed = np.frombuffer(bytes(self.packed), np.uint8)
        return StreamCursor(
            point.order.resolve(), cut_lengths, packed, (self._checksum - point.checksum) & CHECKSUM_MASK
        )

    def leads_to(self, cursor: StreamCursor) -> bool:
        """Return whether the draws so far are as many, and of the same data, as those before ``cursor``."""
        return self.pieces == len(cursor.packed) and self._checksum & CHECKSUM_MASK == cursor.checksum

    def recut(
        self, draws: Sequence[list[Piece]], slots: int, cut_again: Callable[[Piece, int], list[Piece]]
    ) -> list[list[Piece]]:
        """Cut all ``draws`` at a new length too, and return them; what was packed stays packed, in pieces.

        ``cut_again`` cuts a piece and numbers what is left of it from a number on. No point may have been passed yet.
        Raises ``ContractError`` where a snapshot cannot hold so many pieces.
        """
        self.cut_lengths.change(self.draws, slots)
        recut, packed, before = list[list[Piece]](), bytearray(), [0]
        for drawn in draws:
            pieces: list[Piece] = []
            for piece in drawn:
                cut = cut_again(piece, len(packed))
                packed += self.packed[piece.number : piece.number + 1] * len(cut)
                pieces += cut
            recut.append(pieces)
            before.append(len(packed))
        if len(packed) > max(self.pieces, PIECES_LIMIT):
            raise ContractError(
                f"snapshot: at seq_length={slots} the samples drawn since the place of the snapshot are "
                f"{len(packed)} pieces, of at most {PIECES_LIMIT}; resume with a longer one"
            )
        self.pieces, self.packed = len(packed), packed
        self.points = deque(point._replace(pieces=before[point.draws]) for point in self.points)
        return recut
