"""Each operation of the conformance cases, run on our code and compared with what is expected.

What is compared is the outcome and the values, under our names. Messages and error types of a refusal are
upstream's own: ours refuse with a ``ValueError`` of our tree, or with a named rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.conformance import config_operations as config
from tests.conformance import metadata_operations as metadata
from tests.conformance import row_operations as rows
from tests.conformance.vectors import Case

__all__ = ["OPERATIONS"]

OPERATIONS: Mapping[str, Callable[[Case], None]] = {
    "validate_config": config.validate_config,
    "derive_alignment": config.derive_alignment,
    "num_microbatches": config.num_microbatches,
    "normalize_packed_metadata": metadata.normalize_packed_metadata,
    "select_cu_seqlens_for_partition": metadata.select_cu_seqlens_for_partition,
    "required_keys": metadata.required_keys,
    "pack_rows": rows.pack_rows,
    "collate_packed_rows": rows.collate_packed_rows,
    "pad_cu_seqlens": rows.pad_cu_seqlens,
    "pad_thd_sequences": rows.pad_thd_sequences,
    "merge_cu_seqlens_rows": rows.merge_cu_seqlens_rows,
    "thd_padding_mask": rows.thd_padding_mask,
    "seq_idx": rows.segment_numbers,
    "thd_partition_indices": rows.thd_partition_indices,
    "slice_thd_for_cp_rank": rows.slice_thd_for_cp_rank,
    "dense_partition_indices": rows.dense_partition_indices,
    "contiguous_partition_indices": rows.contiguous_partition_indices,
    "compare_partitions": rows.compare_partitions,
    "rope_positions": rows.rope_positions,
}
