"""The rules of lengths, loss and ids at their boundaries, and the comparison of two sides field by field."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from packhorse.contract.batch_contract import (
    AttentionOffsets,
    BatchContract,
    LossReduction,
    Objective,
    Packing,
    ReaderPolicy,
    Remainder,
    TailPadding,
    resolve,
)
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rules import RULES, RuleInput, Severity, check, compare
from tests.strategies import layouts, resolved_contracts

CP1, CP2, CP4 = (ParallelLayout(context=context) for context in (1, 2, 4))
DP3 = ParallelLayout(data=3)
BASE = resolve(BatchContract(), CP1, seq_length=64, global_batch_size=12, vocab_size=1000)
ZIGZAG, CONTIGUOUS, WHOLE = Partition.ZIGZAG, Partition.CONTIGUOUS, Partition.WHOLE
MEAN, PER_TOKEN, STEP_TOKENS = LossReduction.MEAN, LossReduction.PER_TOKEN, LossReduction.STEP_TOKENS


@dataclass(frozen=True)
class Row:
    """One line of a rule's table: the layout, what differs from ``BASE``, and what is found."""

    layout: ParallelLayout
    settings: dict[str, Any]
    field: str | None = None  # None: the rule holds
    severity: Severity = Severity.ERROR

    @property
    def case(self) -> RuleInput:
        return RuleInput(self.layout, replace(BASE, **self.settings))


TABLES: dict[str, list[Row]] = {
    "MBS_ONLINE": [
        Row(CP1, {}),
        Row(CP1, {"micro_batch_size": 2}, "micro_batch_size"),
        Row(DP3, {"micro_batch_size": 4}, "micro_batch_size"),
        Row(CP1, {"micro_batch_size": 64}, "micro_batch_size"),
    ],
    "CP_LENGTH": [
        Row(CP1, {"seq_length": 63}),
        Row(CP2, {"seq_length": 64, "partition": ZIGZAG}),
        Row(CP2, {"seq_length": 62, "partition": ZIGZAG}, "seq_length"),
        Row(CP2, {"seq_length": 62, "partition": WHOLE}, "seq_length"),
        Row(CP2, {"seq_length": 62, "partition": CONTIGUOUS}),
        Row(CP2, {"seq_length": 63, "partition": CONTIGUOUS}, "seq_length"),
        Row(CP4, {"seq_length": 3, "partition": ZIGZAG}, "seq_length"),
    ],
    "SEGMENT_ALIGN": [
        Row(CP1, {"segment_multiple": 1}),
        Row(CP1, {"segment_multiple": 7}),
        Row(CP2, {"segment_multiple": 4, "partition": ZIGZAG}),
        Row(CP2, {"segment_multiple": 12, "partition": WHOLE}),
        Row(CP2, {"segment_multiple": 2, "partition": ZIGZAG}, "segment_multiple"),
        Row(CP2, {"segment_multiple": 1, "partition": WHOLE}, "segment_multiple"),
        Row(CP2, {"segment_multiple": 2, "partition": CONTIGUOUS}),
        Row(CP4, {"segment_multiple": 6, "partition": CONTIGUOUS}, "segment_multiple"),
    ],
    "PACK_ALIGN": [
        Row(CP1, {"segment_multiple": 4, "pack_multiple": 16}),
        Row(CP1, {"segment_multiple": 12, "pack_multiple": 1}, "seq_length"),
        Row(CP1, {"segment_multiple": 4, "pack_multiple": 48}, "seq_length"),
        Row(CP1, {"segment_multiple": 16, "pack_multiple": 6, "seq_length": 48}),
        Row(CP1, {"segment_multiple": 128}, "seq_length"),
    ],
    "PER_TOKEN_LOSS": [
        Row(CP2, {"loss_reduction": STEP_TOKENS}),
        Row(CP2, {"loss_reduction": PER_TOKEN}),
        Row(CP2, {"loss_reduction": MEAN}, "loss_reduction"),
        Row(CP1, {"loss_reduction": MEAN}, "loss_reduction", Severity.WARN),
        Row(CP2, {"loss_reduction": MEAN, "objective": Objective.PRETRAIN}),
        Row(CP1, {"loss_reduction": MEAN, "objective": Objective.PRETRAIN}),
    ],
    "GBS_DIVIDES": [
        Row(CP1, {"global_batch_size": 1}),
        Row(DP3, {"global_batch_size": 12}),
        Row(DP3, {"global_batch_size": 13}, "global_batch_size"),
        Row(DP3, {"global_batch_size": 2}, "global_batch_size"),
        Row(DP3, {"global_batch_size": 12, "micro_batch_size": 8}, "global_batch_size"),
    ],
    "DTYPE_RANGE": [
        Row(CP1, {"vocab_size": 1}),
        Row(CP1, {"vocab_size": 1 << 31}),
        Row(CP1, {"vocab_size": (1 << 31) + 1}, "vocab_size"),
        Row(CP1, {"pad_id": 999}),
        Row(CP1, {"pad_id": 1000}, "pad_id"),
        Row(CP1, {"pad_id": -1}, "pad_id"),
    ],
}
ROWS = [pytest.param(rule, row, id=f"{rule}-{i}") for rule, table in TABLES.items() for i, row in enumerate(table)]


@pytest.mark.parametrize(("rule", "row"), ROWS)
def test_a_rule_says_what_is_wrong_and_nothing_where_it_holds(rule: str, row: Row) -> None:
    found = [violation for violation in check(row.case) if violation.rule == rule]
    assert [(v.field, v.severity) for v in found] == ([] if row.field is None else [(row.field, row.severity)])
    for violation in found:
        got = getattr(row.case.contract, violation.field)
        assert violation.got == str(got)
        assert all(part in str(violation) for part in (rule, violation.field, violation.want, violation.remedy))


def test_every_table_has_what_holds_and_what_breaks() -> None:
    severities = {rule.id: rule.severity for rule in RULES}
    for rule, rows in TABLES.items():
        assert any(row.field is None for row in rows)
        assert any(row.field is not None and row.severity is severities[rule] for row in rows)


NUMBER = re.compile(r"\d+")
SET_TO = re.compile(r"\bto (\d+)")


def proposals(rule: str, remedy: str, field: str) -> list[dict[str, Any]]:
    """What a remedy says to set, read as a person would."""
    numbers = [int(number) for number in NUMBER.findall(remedy)]
    match rule:
        case "MBS_ONLINE":
            return [dict(zip(("micro_batch_size", "global_batch_size", "seq_length"), numbers, strict=True))]
        case "PER_TOKEN_LOSS":
            return [{field: STEP_TOKENS}, {field: PER_TOKEN}]
        case "DTYPE_RANGE":
            return []
        case "SEGMENT_ALIGN":
            return [{field: int(number)} for number in SET_TO.findall(remedy)]
        case _:
            return [{field: number} for number in numbers]


@pytest.mark.parametrize(("rule", "row"), ROWS)
def test_what_a_remedy_proposes_satisfies_the_rule(rule: str, row: Row) -> None:
    for violation in [v for v in check(row.case) if v.rule == rule]:
        offered = proposals(rule, violation.remedy, violation.field)
        assert offered or rule == "DTYPE_RANGE"
        for settings in offered:
            turned = replace(row.case.contract, **settings)
            assert rule not in {v.rule for v in check(RuleInput(row.layout, turned))}, settings


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            Row(CP1, {"micro_batch_size": 4}),
            "the same tokens a step: micro_batch_size 1, global_batch_size 3, seq_length 256",
        ),
        (Row(CP2, {"seq_length": 62, "segment_multiple": 2, "partition": CONTIGUOUS}), None),
        (Row(CP2, {"seq_length": 62, "segment_multiple": 4}), "use 60 or 64"),
        (Row(CP2, {"segment_multiple": 6}), "set segment_multiple to 4, or to 12 to keep 6, or leave it out"),
        (Row(DP3, {"global_batch_size": 13}), "use 12 or 15"),
        (Row(DP3, {"global_batch_size": 2}), "use 3"),
    ],
)
def test_remedies_read_like_this(row: Row, remedy: str | None) -> None:
    assert next((v.remedy for v in check(row.case)), None) == remedy


def test_a_length_below_its_multiple_is_offered_each_value_once() -> None:
    cases: list[dict[str, Any]] = [{"seq_length": 3}, {"seq_length": 3, "segment_multiple": 16}]
    for settings in cases:
        for violation in check(RuleInput(CP4, replace(BASE, **settings))):
            offered = SET_TO if violation.rule == "SEGMENT_ALIGN" else NUMBER
            numbers = offered.findall(violation.remedy)
            assert len(numbers) == len(set(numbers)), violation.remedy


def test_all_violations_are_listed_at_once() -> None:
    contract = replace(
        BASE,
        micro_batch_size=2,
        seq_length=63,
        segment_multiple=3,
        pack_multiple=2,
        loss_reduction=MEAN,
        global_batch_size=7,
        vocab_size=(1 << 31) + 1,
        pad_id=-1,
    )
    assert [(v.rule, v.field) for v in check(RuleInput(ParallelLayout(data=2, context=2), contract))] == [
        ("MBS_ONLINE", "micro_batch_size"),
        ("CP_LENGTH", "seq_length"),
        ("SEGMENT_ALIGN", "segment_multiple"),
        ("PACK_ALIGN", "seq_length"),
        ("PER_TOKEN_LOSS", "loss_reduction"),
        ("GBS_DIVIDES", "global_batch_size"),
        ("DTYPE_RANGE", "vocab_size"),
        ("DTYPE_RANGE", "pad_id"),
    ]


@given(layout=layouts(), data=st.data())
def test_a_contract_that_holds_is_never_refused(layout: ParallelLayout, data: st.DataObject) -> None:
    assert check(RuleInput(layout, data.draw(resolved_contracts(layout)))) == []


FAULTS = sorted(TABLES)


@given(layout=layouts(context=(2, 3, 4)), fault=st.sampled_from(FAULTS), data=st.data())
def test_a_single_fault_is_always_caught_by_the_name_of_its_rule(
    layout: ParallelLayout, fault: str, data: st.DataObject
) -> None:
    assume(fault != "GBS_DIVIDES" or layout.data > 1)  # one data-parallel rank divides everything
    contract = data.draw(resolved_contracts(layout))
    unit = contract.partition.granularity(layout.context)
    slip = data.draw(st.integers(1, unit - 1))
    faults: dict[str, dict[str, Any]] = {
        "MBS_ONLINE": {"micro_batch_size": 2, "global_batch_size": 2 * contract.global_batch_size},
        # A length that fails the cut fails the finer multiple too.
        "CP_LENGTH": {"seq_length": contract.seq_length + slip},
        "SEGMENT_ALIGN": {"segment_multiple": slip, "pack_multiple": 1, "seq_length": contract.seq_length * slip},
        "PACK_ALIGN": {"pack_multiple": 2 * contract.seq_length},
        "PER_TOKEN_LOSS": {"objective": Objective.SFT, "loss_reduction": MEAN},
        "GBS_DIVIDES": {"global_batch_size": contract.global_batch_size * layout.data + 1},
        "DTYPE_RANGE": {"pad_id": contract.vocab_size + slip},
    }
    found = {violation.rule for violation in check(RuleInput(layout, replace(contract, **faults[fault])))}
    implied = {"PACK_ALIGN"} if fault == "CP_LENGTH" else set()
    assert found == {fault} | implied


# The comparison of two sides ------------------------------------------------------------------------

SERVED_ON = ParallelLayout(data=2, context=2)
SERVED = resolve(BatchContract(partition=ZIGZAG), SERVED_ON, seq_length=4096, global_batch_size=8, vocab_size=50_000)


def test_what_is_not_declared_is_not_compared() -> None:
    assert compare(BatchContract(), SERVED_ON, 4, SERVED, SERVED_ON) == []


@given(st.sets(st.sampled_from([f.name for f in fields(SERVED)])))
def test_what_is_declared_equal_is_accepted(names: set[str]) -> None:
    declared = BatchContract(**{name: getattr(SERVED, name) for name in names})
    assert compare(declared, SERVED_ON, 2, SERVED, SERVED_ON) == []


DIFFERENCES: dict[str, tuple[object, str]] = {
    "seq_length": (2048, "SEQ_LENGTH_MATCH"),
    "micro_batch_size": (2, "RANKS_AGREE"),
    "global_batch_size": (16, "RANKS_AGREE"),
    "packing": (Packing.CONCAT, "RANKS_AGREE"),
    "partition": (WHOLE, "PARTITION"),
    "segment_multiple": (8, "SEGMENT_ALIGN"),
    "pack_multiple": (8, "PACK_ALIGN"),
    "pad_to_max_length": (False, "RANKS_AGREE"),
    "tail_padding": (TailPadding.EXTEND_LAST, "RANKS_AGREE"),
    "objective": (Objective.PRETRAIN, "RANKS_AGREE"),
    "loss_reduction": (PER_TOKEN, "RANKS_AGREE"),
    "remainder": (Remainder.DROP, "RANKS_AGREE"),
    "isolate_documents": (False, "RANKS_AGREE"),
    "readers": (ReaderPolicy.TENSOR_ZERO, "RANKS_AGREE"),
    "evaluation_context": (4, "RANKS_AGREE"),
    "static_shapes": (True, "RANKS_AGREE"),
    "pad_cu_seqlens": (True, "RANKS_AGREE"),
    "max_segments": (64, "RANKS_AGREE"),
    "attention_offsets": (AttentionOffsets.LOGICAL, "RANKS_AGREE"),
    "padding_mask": (True, "RANKS_AGREE"),
    "vocab_size": (49_999, "DTYPE_RANGE"),
    "pad_id": (1, "DTYPE_RANGE"),
    "ignore_index": (-1, "DTYPE_RANGE"),
}


def test_every_field_that_can_differ_is_in_the_table() -> None:
    assert DIFFERENCES.keys() == {f.name for f in fields(SERVED)}


@pytest.mark.parametrize("field", DIFFERENCES)
def test_a_field_that_differs_is_named_with_its_rule_and_both_values(field: str) -> None:
    value, rule = DIFFERENCES[field]
    declared: dict[str, Any] = {field: value}
    (found,) = compare(BatchContract(**declared), SERVED_ON, 4, SERVED, SERVED_ON)
    assert (found.rule, found.field, found.severity) == (rule, field, Severity.ERROR)
    assert found.want.startswith(str(getattr(SERVED, field)))
    assert found.got == str(value)
    assert field in found.remedy


def test_a_falsy_declaration_is_a_declaration() -> None:
    served = replace(SERVED, pad_id=5, ignore_index=-100)
    declared = BatchContract(pad_id=0, ignore_index=0, pad_to_max_length=False)
    assert [v.field for v in compare(declared, SERVED_ON, 4, served, SERVED_ON)] == [
        "pad_to_max_length",
        "pad_id",
        "ignore_index",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", 4),
        ("context", 1),
        ("tensor", 2),
        ("pipeline", 2),
        ("sequence_parallel", True),
        ("order", "dp-cp-tp-pp"),
    ],
)
def test_a_layout_that_differs_is_named_by_its_degree(field: str, value: Any) -> None:
    (found,) = compare(BatchContract(), replace(SERVED_ON, **{field: value}), 4, SERVED, SERVED_ON)
    assert (found.rule, found.field, found.got) == ("WORLD", f"layout.{field}", str(value))


def test_an_order_that_differs_where_axes_of_size_one_stand_is_the_same_order() -> None:
    assert SERVED_ON.pipeline == 1
    assert compare(BatchContract(), replace(SERVED_ON, order="tp-cp-pp-dp"), 4, SERVED, SERVED_ON) == []


@pytest.mark.parametrize("window", [0, 1])
def test_a_window_below_two_is_refused(window: int) -> None:
    (found,) = compare(BatchContract(), SERVED_ON, window, SERVED, SERVED_ON)
    assert (found.rule, found.field, found.got) == ("WINDOW", "window", str(window))
    assert compare(BatchContract(), SERVED_ON, int(NUMBER.findall(found.remedy)[0]), SERVED, SERVED_ON) == []


@given(st.sets(st.sampled_from(sorted(DIFFERENCES))), st.booleans(), st.integers(0, 4))
def test_all_differences_are_listed_at_once(names: set[str], other_layout: bool, window: int) -> None:
    declared = BatchContract(**{name: DIFFERENCES[name][0] for name in names})  # type: ignore[arg-type]
    on = ParallelLayout(data=4, context=2) if other_layout else SERVED_ON
    expected = names | ({"layout.data"} if other_layout else set()) | ({"window"} if window < 2 else set())
    found = compare(declared, on, window, SERVED, SERVED_ON)
    assert {v.field for v in found} == expected
    assert len(found) == len(expected)
