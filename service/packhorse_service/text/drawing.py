"""What the pictures have in common: colours, hatched padding, bare axes, and a PNG at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from packhorse.errors import ConfigError

__all__ = ["ACCENT", "FAINT", "INK", "PADDING", "PALE", "SHADES", "save", "strip", "title"]

INK, PALE, FAINT = "#22313f", "#7b8894", "#e6eaee"
ACCENT = "#2f6f9f"
SHADES = (  # by source; neighbours alternate
    ("#cf7420", "#f3bf86"),
    ("#2f6f9f", "#93bfe0"),
    ("#4f8534", "#a5cc8e"),
    ("#8a4f9e", "#cfa9dc"),
    ("#b23a48", "#e8a3ab"),
    ("#2a8c86", "#8fd0cb"),
    ("#8c6d1f", "#d9c27e"),
    ("#4a5a8c", "#a9b4d9"),
)
PADDING: dict[str, Any] = {"facecolor": "#f3f4f6", "edgecolor": "#9aa5b1", "hatch": "//////", "linewidth": 0}


def strip(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Leave only the labels of the axes."""
    axes.set(xlim=x, ylim=y)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=0, labelcolor=PALE, labelsize=8)


def title(axes: Axes, text: str, size: int = 11) -> None:
    """Draw a title at the left."""
    axes.set_title(text, loc="left", color=INK, fontsize=size, fontweight="bold", pad=10)


def save(figure: Figure, path: Path) -> None:
    """Draw a report and write it as a PNG. Raises ``ConfigError`` where that is not possible."""
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
