"""What is required of a load test: ``wait_p99_ms < 20``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packhorse.errors import ConfigError
from packhorse_service.loadtest.scenario.measured import METRICS

__all__ = ["Threshold", "ThresholdResult", "judge", "parse_threshold"]

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
FORM = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+|[^\s]+)\s*")


@dataclass(frozen=True, slots=True)
class Threshold:
    """A metric, an operator and what it is compared with."""

    metric: str
    operator: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.limit:g}"

    def holds(self, value: float | None) -> bool:
        """Return whether a measured value keeps to the threshold; what is not known does not."""
        return value is not None and OPERATORS[self.operator](value, self.limit)


@dataclass(frozen=True, slots=True)
class ThresholdResult:
    """A threshold and what was measured; ``None`` where that is not known."""

    threshold: Threshold
    measured: float | None
    met: bool


def parse_threshold(text: str) -> Threshold:
    """Read a threshold. Raises ``ConfigError`` that names what is wrong, and every metric where that is its name."""
    found = FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"require={text!r} must be METRIC OPERATOR NUMBER, as in 'wait_p99_ms < 20'; {OPERATORS_ARE}")
    name, comparison, number = found.groups()
    if name not in METRICS:
        raise ConfigError(f"require={text!r}: no metric {name!r}; there are {', '.join(METRICS)}")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(f"require={text!r}: {number!r} must be a number, in the unit of {name}")
    return Threshold(name, comparison, limit)


def judge(thresholds: tuple[Threshold, ...], values: Mapping[str, float | None]) -> tuple[ThresholdResult, ...]:
    """Every threshold against what was measured, in the order given."""
    measured = [(threshold, values[threshold.metric]) for threshold in thresholds]
    return tuple(ThresholdResult(threshold, value, threshold.holds(value)) for threshold, value in measured)


OPERATORS_ARE = f"operators are {' '.join(OPERATORS)}"
