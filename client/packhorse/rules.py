"""The rules that make a contract valid, and the comparison of two sides.

A rule is data: a stable id, a severity and a check that yields what is wrong. A rule that holds says
nothing. The same rules serve the command line and the handshake; all violations are listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum

from packhorse.contract import BatchContract, LossReduction, Objective, ResolvedContract
from packhorse.layout import ParallelLayout

__all__ = ["RULES", "Case", "Rule", "Severity", "Violation", "check", "compare"]

MINIMUM_WINDOW = 2


class Severity(StrEnum):
    ERROR = "error"  # refuses the handshake
    WARN = "warn"  # reported to both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule: what was wanted, what was found, and what to change."""

    rule: str
    severity: Severity
    field: str
    want: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.field} is {self.got}, must be {self.want}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Case:
    """What the rules are about: one stream's resolved contract on one layout."""

    layout: ParallelLayout
    contract: ResolvedContract


Finding = tuple[str, str, str, str]  # field, want, got, remedy


@dataclass(frozen=True, slots=True)
class Rule:
    """``check`` yields (field, want, got, remedy) for each way in which a case breaks the rule."""

    id: str
    severity: Severity
    check: Callable[[Case], Iterator[Finding]]

    @property
    def summary(self) -> str:
        """The rule in one line, from the check's docstring."""
        return (self.check.__doc__ or "").strip().splitlines()[0]

    def violations(self, case: Case) -> Iterator[Violation]:
        for field, want, got, remedy in self.check(case):
            yield Violation(rule=self.id, severity=self.severity, field=field, want=want, got=got, remedy=remedy)


def _near(value: int, unit: int) -> str:
    """A remedy: the multiples of ``unit`` around ``value``."""
    below = value // unit * unit
    return f"use {below} or {below + unit}" if below else f"use {unit}"


def mbs_online(case: Case) -> Iterator[Finding]:
    """Rows packed online are micro-batches of one: micro_batch_size == 1."""
    mbs, contract = case.contract.micro_batch_size, case.contract
    if mbs > 1:
        gbs, length = max(1, contract.global_batch_size // mbs), contract.seq_length * mbs
        yield (
            "micro_batch_size",
            "1",
            str(mbs),
            f"the same tokens a step: micro_batch_size 1, global_batch_size {gbs}, seq_length {length}",
        )


def cp_length(case: Case) -> Iterator[Finding]:
    """With CP > 1 seq_length divides by 2·CP (zigzag and whole rows) or CP (contiguous)."""
    unit = case.contract.partition.granularity(case.layout.context)
    if case.contract.seq_length % unit:
        yield (
            "seq_length",
            f"a multiple of {unit}",
            str(case.contract.seq_length),
            _near(case.contract.seq_length, unit),
        )


def segment_align(case: Case) -> Iterator[Finding]:
    """segment_multiple is a multiple of 2·CP (zigzag and whole rows) or CP (contiguous)."""
    unit = case.contract.partition.granularity(case.layout.context)
    if case.contract.segment_multiple % unit:
        yield (
            "segment_multiple",
            f"a multiple of {unit}",
            str(case.contract.segment_multiple),
            f"set segment_multiple to {unit}, or leave it out",
        )


def pack_align(case: Case) -> Iterator[Finding]:
    """seq_length divides by lcm(segment_multiple, pack_multiple)."""
    unit = case.contract.row_multiple
    if case.contract.seq_length % unit:
        yield (
            "seq_length",
            f"a multiple of {unit} = lcm(segment_multiple, pack_multiple)",
            str(case.contract.seq_length),
            _near(case.contract.seq_length, unit),
        )


def gbs_divides(case: Case) -> Iterator[Finding]:
    """global_batch_size divides by micro_batch_size · DP, with at least one micro-batch."""
    share = case.contract.micro_batch_size * case.layout.data
    if case.contract.global_batch_size % share or case.contract.global_batch_size < share:
        yield (
            "global_batch_size",
            f"a multiple of micro_batch_size · DP = {share}",
            str(case.contract.global_batch_size),
            _near(case.contract.global_batch_size, share),
        )


def per_token_loss(case: Case) -> Iterator[Finding]:
    """Fine-tuning with CP > 1 does not average per micro-batch: a CP rank may hold no supervised token."""
    if _averages(case) and case.layout.context > 1:
        yield (
            "loss_reduction",
            "per_token or step_tokens",
            "mean",
            "divide by MicroBatch.step_loss_tokens, or let the stack reduce (Megatron: calculate_per_token_loss)",
        )


def mean_changes_weights(case: Case) -> Iterator[Finding]:
    """A mean of pack means weighs a sample by its neighbours."""
    if _averages(case) and case.layout.context == 1:
        yield "loss_reduction", "per_token or step_tokens", "mean", "divide by MicroBatch.step_loss_tokens"


def _averages(case: Case) -> bool:
    contract = case.contract
    return contract.objective is Objective.SFT and contract.loss_reduction is LossReduction.MEAN


def dtype_range(case: Case) -> Iterator[Finding]:
    """Token ids, the padding id among them, fit the vocabulary and 32 bits."""
    vocab = case.contract.vocab_size
    if not 1 <= vocab <= 1 << 31:
        yield "vocab_size", "1 … 2³¹", str(vocab), "declare the tokenizer's vocabulary"
    if not 0 <= case.contract.pad_id < vocab:
        yield "pad_id", f"an id below the vocabulary of {vocab}", str(case.contract.pad_id), "name an id that exists"


RULES: tuple[Rule, ...] = (
    Rule("MBS_ONLINE", Severity.ERROR, mbs_online),
    Rule("CP_LENGTH", Severity.ERROR, cp_length),
    Rule("SEGMENT_ALIGN", Severity.ERROR, segment_align),
    Rule("PACK_ALIGN", Severity.ERROR, pack_align),
    Rule("PER_TOKEN_LOSS", Severity.ERROR, per_token_loss),
    Rule("PER_TOKEN_LOSS", Severity.WARN, mean_changes_weights),
    Rule("GBS_DIVIDES", Severity.ERROR, gbs_divides),
    Rule("DTYPE_RANGE", Severity.ERROR, dtype_range),
)


def check(case: Case) -> list[Violation]:
    """Every rule that the case breaks, errors and warnings, in the order of ``RULES``."""
    return [violation for rule in RULES for violation in rule.violations(case)]


FIELD_RULES = {
    "seq_length": "SEQ_LENGTH_MATCH",
    "partition": "PARTITION",
    "segment_multiple": "SEGMENT_ALIGN",
    "pack_multiple": "PACK_ALIGN",
    "vocab_size": "DTYPE_RANGE",
    "pad_id": "DTYPE_RANGE",
}


def compare(
    declared: BatchContract, on: ParallelLayout, window: int, served: ResolvedContract, served_on: ParallelLayout
) -> list[Violation]:
    """Where a reader's declaration differs from what the server serves. What it leaves out is not compared."""
    found = [
        _difference(FIELD_RULES.get(f.name, "RANKS_AGREE"), f.name, getattr(served, f.name), getattr(declared, f.name))
        for f in fields(declared)
        if getattr(declared, f.name) not in (None, getattr(served, f.name))
    ]
    found += [
        _difference("WORLD", f"layout.{f.name}", getattr(served_on, f.name), getattr(on, f.name))
        for f in fields(on)
        if getattr(on, f.name) != getattr(served_on, f.name)
    ]
    if window < MINIMUM_WINDOW:
        remedy = f"set window to {MINIMUM_WINDOW} or more, or leave it out"
        found.append(_error("WINDOW", "window", f"at least {MINIMUM_WINDOW}", str(window), remedy))
    return found


def _difference(rule: str, field: str, want: object, got: object) -> Violation:
    return _error(rule, field, f"{want} (the server's)", str(got), f"set {field} to the same value on both sides")


def _error(rule: str, field: str, want: str, got: str, remedy: str) -> Violation:
    return Violation(rule=rule, severity=Severity.ERROR, field=field, want=want, got=got, remedy=remedy)
