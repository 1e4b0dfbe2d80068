"""Operations on rows: packing them, fixing their offsets, cutting them, masking their padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from packhorse import MicroBatch, Packing, ParallelLayout, Partition, TailPadding
from packhorse.adapters import megatron_bridge
from packhorse.adapters.varlen import seq_idx
from packhorse.contract.batch_contract import ResolvedContract
from packhorse.errors import ContractError, PackhorseError
from packhorse.feeding.torch_arrays import to_torch
from packhorse.rows.context_parallel import local_slots
from packhorse.rows.geometry import Geometry
from packhorse_service.sources.formats import TokenArrays
from tests.conformance.rows import contract_of, deliver, micro_batch_with, receive_offsets, samples_of
from tests.conformance.vectors import Case

REFUSED = ValueError  # ContractError, ConfigError and SourceError all are
IGNORED = -100  # what a source writes for "no label", whatever its padding holds


def equal(found: Any, expected: Any) -> None:
    assert np.asarray(found).tolist() == expected


# pack_rows: a micro-batch of in-batch packing --------------------------------------------------------------


def pack_rows(case: Case) -> None:
    if "rows" not in case.input and "row_lengths" not in case.input:
        return _dtypes(case)
    given = _with_rows(case.input)
    if case.rejects:
        with pytest.raises(REFUSED):
            deliver(_samples(given), _in_batch(given))
        return None
    return _compare_row(deliver(_samples(given), _in_batch(given)), case)


def _with_rows(given: Mapping[str, Any]) -> dict[str, Any]:
    """A case that gives only lengths, with rows of these lengths."""
    if "rows" in given:
        return dict(given)
    lengths = given["row_lengths"]
    return {**given, "rows": [[1] * n + [0] * (max(lengths) - n) for n in lengths]}


def _samples(given: Mapping[str, Any]) -> list[TokenArrays]:
    """Right-padded rows as samples that bring their own labels: n ids are n slots."""
    rows, pad = given["rows"], given.get("pad_token", 0)
    masks = given.get("attention_mask") or [[token != pad for token in row] for row in rows]
    columns = [given.get(name) or [None] * len(rows) for name in ("labels", "loss_mask")]
    samples = []
    for row, mask, labels, loss in zip(rows, masks, *columns, strict=True):
        n = int(sum(mask))
        weights = None if loss is None else np.array(loss[:n]).astype(np.uint8)
        samples.append(TokenArrays(np.array(row[:n], int), weights, np.array((labels or row)[:n], int)))
    return samples


def _in_batch(given: Mapping[str, Any]) -> ResolvedContract:
    """The contract of a case. A fixed width is that of one row, whose tail extends the last segment."""
    width = given.get("fixed_width")
    shared = {"segment_multiple": given.get("multiple", 1), "pad_id": given.get("pad_token", 0)}
    shared |= {"ignore_index": given.get("pad_label", -100), "tail_padding": TailPadding.EXTEND_LAST}
    if width is not None:
        return contract_of(seq_length=width, packing=Packing.ONLINE, **shared)
    rows = given["rows"]
    aligned = -(-max(map(len, rows)) // shared["segment_multiple"]) * shared["segment_multiple"]
    limit = given.get("sequence_length", aligned)
    return contract_of(seq_length=limit, packing=Packing.IN_BATCH, micro_batch_size=len(rows), **shared)


def _compare_row(found: MicroBatch, case: Case) -> None:
    expect, length = case.expect, len(found.tokens)
    for ours, theirs in (("cu_seqlens", "cu_seqlens_logical"), ("cu_seqlens_padded", "cu_seqlens_physical")):
        if expect.get(theirs) is not None:
            equal(getattr(found, ours), expect[theirs])
    for name in ("tokens", "position_ids", "max_seqlen"):
        if expect.get(name) is not None:
            equal(getattr(found, name), expect[name])
    assert expect.get("total", length) == length
    assert megatron_bridge.batch(to_torch(found, pin=False))["attention_mask"] is expect.get("attention_mask")
    mask = case.raw.get("padding_mask", expect.get("padding_mask"))
    if mask is not None:
        equal(found.padding_mask, [bool(entry) for entry in mask])
    _compare_targets(found, expect.get("labels"), expect.get("loss_mask"))


def _compare_targets(found: MicroBatch, given_labels: Sequence[int] | None, loss_mask: Sequence[float] | None) -> None:
    """A slot whose label is ignored has no target: it is never weighed, and its label is ``ignore_index``."""
    if given_labels is None:
        assert loss_mask is None or found.loss_mask.tolist() == loss_mask
        return
    labels = np.array(given_labels)
    none = (labels == found.ignore_index) | (labels == IGNORED)
    equal(found.labels[~none], labels[~none].tolist())
    assert (found.masked_labels()[none] == found.ignore_index).all()
    equal(found.labels[found.padding_mask], labels[found.padding_mask].tolist())
    if loss_mask is not None:
        equal(found.loss_mask, np.where(none & ~found.padding_mask, 0.0, loss_mask).tolist())


def _dtypes(case: Case) -> None:
    values = megatron_bridge.batch(micro_batch_with([0, 3, 8], [0, 4, 12]))
    for name, expected in case.expect.items():
        if name != "outcome":
            tensor = values[{"cu_seqlens": "cu_seqlens_q", "max_seqlen": "max_seqlen_q"}.get(name, name)]
            words = expected.split(" ")
            assert str(tensor.dtype) == f"torch.{words[0]}"
            assert "0-d" not in words or tensor.dim() == 0
            assert "CPU" not in words or tensor.device.type == "cpu"


# collate_packed_rows: offsets, padding mask and counts of a fine-tuning pack -------------------------------


def collate_packed_rows(case: Case) -> None:
    """Labels on padding, tail positions and the logical tail at alignment 1 are Bridge's own and not compared."""
    given, expect = case.input, case.expect
    aligned = given["pad_seq_to_mult"] > 1
    rows = [_stored_samples(row, given["eos_id"] if aligned else None) for row in given["rows"]]
    contract = _collate_contract(given, rows)
    if case.rejects:
        with pytest.raises(REFUSED):
            [deliver(samples, contract) for samples in rows]
        return
    found = [deliver(samples, contract) for samples in rows]
    fixed = replace(contract, pad_cu_seqlens=True, max_segments=max(map(len, rows)))
    entries = max(map(len, rows)) + 2
    for i, (batch, samples) in enumerate(zip(found, rows, strict=True)):
        logical, physical = deliver(samples, fixed).host_offsets
        if aligned:
            equal(logical, _filled(expect["cu_seqlens_q"][i], entries))
        equal(physical, _filled(expect["cu_seqlens_q_padded" if aligned else "cu_seqlens_q"][i], entries))
        equal([batch.max_seqlen], expect["max_seqlen_q"][i])
        equal(batch.padding_mask, expect["padding_mask"][i])
        assert int(physical[len(samples)]) == expect["token_count"][i]
        equal(batch.tokens, expect["tokens"][i])
        real = ~np.array(expect["padding_mask"][i])
        for name in ("labels", "loss_mask", "position_ids"):
            equal(getattr(batch, name)[real], np.array(expect[name][i])[real].tolist())


def _filled(offsets: Sequence[int], entries: int) -> list[int]:
    """Offsets as a contract that fixes their number has them; Bridge has those of the longest row of a batch."""
    assert not any(offset != offsets[-1] for offset in offsets[entries:])
    return [*offsets, *[offsets[-1]] * (entries - len(offsets))][:entries]


def _stored_samples(row: Mapping[str, Any], eos: int | None) -> list[TokenArrays]:
    """Stored sequences as samples without their alignment padding, whose length Bridge reads off trailing EOS.

    Stored loss masks are shifted already: an id's own mask is that of the slot before it.
    """
    samples = []
    bounds = row["seq_boundaries"]
    for start, end in itertools.pairwise(bounds):
        ids, mask = row["input_ids"][start:end], row["loss_mask"][start:end]
        slots = len(ids) - 1
        while eos is not None and slots and ids[slots - 1] == eos:
            slots -= 1
        samples.append(TokenArrays(np.array(ids[: slots + 1]), np.array([0, *mask[:slots]], np.uint8)))
    return samples


def _collate_contract(given: Mapping[str, Any], rows: Sequence[Sequence[TokenArrays]]) -> ResolvedContract:
    multiple = given["pad_seq_to_mult"]
    slots = [sum(-(-(len(sample.ids) - 1) // multiple) * multiple for sample in samples) for samples in rows]
    unit = given.get("width_multiple", 1)
    width = given["max_seq_length"] if given["pad_to_max_length"] else -(-max(slots) // unit) * unit
    return contract_of(seq_length=width, segment_multiple=multiple, pad_id=given["eos_id"])


# Offsets -----------------------------------------------------------------------------------------------------


def pad_cu_seqlens(case: Case) -> None:
    """Our constant ``max_seqlen`` is ``seq_length`` (DESIGN §4): a stream has no metadata to take another from."""
    given, expect = case.input, case.expect
    width = given["max_length"]
    most = max(entry["max_samples_per_bin"] for entry in given["metadata"])
    lengths = np.diff(given["cu_seqlens"])
    samples = samples_of(lengths[:most] if len(lengths) == most + 1 else lengths)  # one more: the row's tail
    contract = contract_of(seq_length=width, pad_cu_seqlens=True, max_segments=most)
    if case.rejects:
        with pytest.raises(ContractError):
            deliver(samples, contract)
        return
    batch = deliver(samples, contract)
    equal(batch.cu_seqlens_padded, expect["new"])
    assert len(batch.cu_seqlens_padded) == expect.get("entries", len(batch.cu_seqlens_padded))
    assert batch.max_seqlen == width
    wire = megatron_bridge.legacy_batch(to_torch(batch, pin=False))
    equal(wire["cu_seqlens"][0], expect.get("legacy_wire", [*expect["new"], -1]))
    equal(wire["cu_seqlens_argmin"], [[expect.get("legacy_argmin", len(expect["new"]))]])


def merge_cu_seqlens_rows(case: Case) -> None:
    """We merge no rows: the segments of several rows are those of one row from the start."""
    rows, length = case.input["rows"], case.input["seq_length"]
    lengths = [slots for row in rows for slots in np.diff(row) if slots]
    merged = deliver(samples_of(lengths), contract_of(seq_length=length * len(rows)))
    equal(merged.cu_seqlens_padded, case.expect["cu_seqlens"])
    assert list(megatron_bridge.batch(to_torch(merged, pin=False))["tokens"].shape) == case.expect["tokens_shape"]


def thd_padding_mask(case: Case) -> None:
    logical, physical = case.input["cu_seqlens"], case.input["cu_seqlens_padded"]
    equal(micro_batch_with(logical, physical).padding_mask, case.expect)


def segment_numbers(case: Case) -> None:
    offsets = torch.tensor(case.input["cu_seqlens"], dtype=torch.int32)
    found = seq_idx(offsets, case.input["total_tokens"])
    assert found.dtype == torch.int32
    equal(found, case.expect)


# Context parallelism -----------------------------------------------------------------------------------------


Cut = Callable[[int], npt.NDArray[np.int64]]  # rank -> its slots


def _compare_ranks(case: Case, cut: Cut) -> None:
    """Each rank that a case names gets its slots; a row that cannot be cut is refused to every rank."""
    if not case.rejects:
        ranks = [key for key in case.expect if key.startswith("rank_")]
        assert ranks
        for key in ranks:
            equal(cut(int(key.removeprefix("rank_"))), case.expect[key])
        return
    for rank in [case.input["cp_rank"]] if "cp_rank" in case.input else range(case.input["cp_size"]):
        with pytest.raises(PackhorseError):
            cut(rank)


def _held(offsets: npt.NDArray[Any], width: int, context: int, rank: int) -> npt.NDArray[np.int64]:
    """The slots of a row that a rank holds, once it has received the row's offsets."""
    slots: npt.NDArray[np.int64] = receive_offsets(offsets, width, ParallelLayout(context=context), rank).slots()
    return slots


def thd_partition_indices(case: Case) -> None:
    given = case.input
    offsets = np.array(given["cu_seqlens"], given.get("dtype", "int32"))
    width = given.get("row_length", given.get("total_tokens", offsets.flat[-1]))
    _compare_ranks(case, lambda rank: _held(offsets, width, given["cp_size"], rank))


def slice_thd_for_cp_rank(case: Case) -> None:
    """Each tensor keeps its own dimensions: the one as long as the row is cut."""
    given = case.input
    offsets = np.array(given["cu_seqlens_padded"], np.int32)
    arrays = {name: np.array(values) for name, values in given["tensors"].items()}

    def cut(name: str, rank: int) -> npt.NDArray[Any]:
        array, width = arrays[name], int(offsets[-1])
        axis = array.shape.index(width) if width in array.shape else 0
        return np.take(array, _held(offsets, array.shape[axis], given["cp_size"], rank), axis=axis)

    if case.rejects:
        return _compare_ranks(case, lambda rank: cut(next(iter(arrays)), rank))
    for key, of_rank in case.expect.items():
        if key.startswith("rank_"):
            for name, expected in of_rank.items():
                equal(cut(name, int(key.removeprefix("rank_"))), expected)
    return None


def _dense(width: int, size: int, rank: int) -> npt.NDArray[np.int64]:
    return local_slots(Partition.ZIGZAG, [0, width], size, rank)


def dense_partition_indices(case: Case) -> None:
    _compare_ranks(case, lambda rank: _dense(case.input["length"], case.input["cp_size"], rank))


def contiguous_partition_indices(case: Case) -> None:
    width, size = case.input["total_tokens"], case.input["cp_size"]
    _compare_ranks(case, lambda rank: local_slots(Partition.CONTIGUOUS, [0, width], size, rank))


def compare_partitions(case: Case) -> None:
    given = case.input
    offsets, size, rank = given["cu_seqlens"], given["cp_size"], given["cp_rank"]
    equal(local_slots(Partition.ZIGZAG, offsets, size, rank), case.expect["thd_indices"])
    equal(_dense(offsets[-1], size, rank), case.expect["dense_indices"])


def rope_positions(case: Case) -> None:
    """Rows of a table over the whole row, and positions within each segment."""
    offsets = np.array(case.input["cu_seqlens"])
    slots = local_slots(Partition.ZIGZAG, offsets, case.input["cp_size"], case.input["cp_rank"])
    equal(slots, case.expect["packed_freq_table_rows"])
    for name in ("per_sequence_table_positions", "wrong_if_offsets_ignored"):
        equal(Geometry(offsets, offsets).position_ids[slots], case.expect[name])


def pad_thd_sequences(case: Case) -> None:
    """Segments padded to a multiple, as a source's own labels and ids come out of the service."""
    given, bounds = case.input, case.input["cu_seqlens"]
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    labels = given.get("labels") or given["tokens"]
    samples = [TokenArrays(np.array(given["tokens"][at]), labels=np.array(labels[at])) for at in spans]
    contract = contract_of(
        seq_length=sum(-(-(b.stop - b.start) // given["multiple"]) * given["multiple"] for b in spans),
        segment_multiple=given["multiple"],
        pad_id=given.get("pad_token", 0),
        ignore_index=given.get("pad_label", -100),
    )
    found = deliver(samples, contract)
    for name in ("tokens", "position_ids", "cu_seqlens_padded"):
        if case.expect.get(name) is not None:
            equal(getattr(found, name), case.expect[name])
    _compare_targets(found, case.expect.get("labels"), None)
