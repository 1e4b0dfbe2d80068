"""``packhorse`` whose loop looks at nothing and logs nothing: what being watched is compared with."""

from __future__ import annotations

from packhorse_service.cli import main
from packhorse_service.monitoring.loop_hook import LoopMonitor

__all__: list[str] = []


def on_turn(_monitoring: LoopMonitor, _now: float, _connections: int) -> None:
    """In place of the real one."""


if __name__ == "__main__":
    LoopMonitor.on_turn = on_turn  # type: ignore[method-assign, assignment]
    main()
