"""The rules that make a contract valid, the comparison of two sides, and what running processes must keep.

One set of rules serves the command line (``packhorse check``) and the handshake; all violations are listed at once.
``catalog`` lists the rules about what is declared, in the order of the documentation: ``lengths``, ``loss``,
``shapes``, ``graphs``, ``precision``, ``training_framework`` and ``families`` hold their checks, ``conditions`` says
which streams they concern, ``stack_versions`` what they were held against, ``model`` what a rule is. ``runtime_rules``
are those that only running processes can check. ``make docs`` writes ``docs/rules.md`` from all of them.
"""

from packhorse.rules.catalog import RULES, check, errors, unchecked, warnings
from packhorse.rules.comparison import compare
from packhorse.rules.explanation import explain
from packhorse.rules.families import FAMILIES, Family
from packhorse.rules.model import Breach, Rule, RuleInput, RuntimeRule, Severity, Unchecked, Violation
from packhorse.rules.runtime_rules import RUNTIME_RULES
from packhorse.rules.stack_versions import StackVersions
from packhorse.rules.training_framework import MINIMUM_WINDOW

__all__ = [
    "FAMILIES",
    "MINIMUM_WINDOW",
    "RULES",
    "RUNTIME_RULES",
    "Breach",
    "Family",
    "Rule",
    "RuleInput",
    "RuntimeRule",
    "Severity",
    "StackVersions",
    "Unchecked",
    "Violation",
    "check",
    "compare",
    "errors",
    "explain",
    "unchecked",
    "warnings",
]
