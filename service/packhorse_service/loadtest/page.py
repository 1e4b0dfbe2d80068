"""page"""

from pathlib import Path

from packhorse_service.loadtest.outcome import Outcome


def write_page(outcome: Outcome, path: Path) -> None:
    """x"""
