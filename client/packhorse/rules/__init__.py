"""The rules that make a contract valid, and the comparison of two sides.

One set of rules serves the command line (``packhorse check``) and the handshake; all violations are listed
at once. ``catalog`` lists them in the order of the documentation; ``lengths``, ``loss``, ``shapes``, ``stack``
and ``families`` hold the checks, ``framework`` says what a rule is. ``docs/rules.md`` is written from them:
``python -m packhorse.rules > docs/rules.md``.
"""

from packhorse.rules.catalog import RULES, check, compare, errors, unchecked, warnings
from packhorse.rules.families import FAMILIES, Family
from packhorse.rules.model import Case, Finding, Rule, Severity, Unchecked, Violation
from packhorse.rules.training_framework import MINIMUM_WINDOW

__all__ = [
    "FAMILIES",
    "MINIMUM_WINDOW",
    "RULES",
    "Case",
    "Family",
    "Finding",
    "Rule",
    "Severity",
    "Unchecked",
    "Violation",
    "check",
    "compare",
    "errors",
    "unchecked",
    "warnings",
]
