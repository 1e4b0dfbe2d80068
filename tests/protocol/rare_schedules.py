"""Schedules for the pairs that random ones may miss."""

from __future__ import annotations

from collections.abc import Callable

from tests.protocol.world import Seen

RARE: list[Callable[[Seen], None]] = []
