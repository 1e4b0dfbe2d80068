"""What of a configuration makes a stream the same stream: the parts of its fingerprint.

Everything that decides a byte is in one of them, and nothing that only says where data lies or who loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse_service.config.serve_config import ServeConfig
from packhorse_service.loading.decode import DecodingSpec
from packhorse_service.loading.tokenizer import Tokenizer
from packhorse_service.mixing.open_blocks import SourcePlan
from packhorse_service.mixing.unsupervised import Unsupervised
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import CostModel
from packhorse_service.snapshot.fingerprint import StreamFingerprint

__all__ = ["fingerprint_config"]


def fingerprint_config(
    config: ServeConfig,
    tokenizer: Tokenizer | None,
    settings: tuple[SourcePlan, ...],
    decoding: Mapping[str, DecodingSpec],
    packing: PackingPlan,
    cost: CostModel,
    contract: ResolvedContract,
    layout: ParallelLayout,
) -> StreamFingerprint:
    """Return the fingerprint of the stream that a configuration describes."""
    sample_parts = {
        "blocks": [[d.name, d.block_bytes] for d in decoding.values()],
        "date": config.date,
        "manifest": [
            [s.order.name, [[shard.name, shard.size, shard.digest.hex()] for shard in s.shards]] for s in settings
        ],
        "mixture": [[[s.order.weight, s.order.epochs] for s in settings], config.mixing.model_dump()],
        "order": [asdict(replace(s.order, weight=1, epochs=1)) for s in settings],
        # What is left as it is by default adds nothing, so that older checkpoints go on.
        "over_length": [
            [s.over_length, s.skip_budget, *([s.unsupervised] if s.unsupervised is not Unsupervised.KEEP else [])]
            for s in settings
        ],
        "rendering": [
            [
                *(d.name, d.format, d.chat_template),
                *([sorted(d.ignore_fields)] if d.ignore_fields else []),
                *([{"members": sorted(d.ignore_members)}] if d.ignore_members else []),
            ]
            for d in decoding.values()
        ],
        "tokenizer": None if tokenizer is None else [tokenizer.digest, tokenizer.special_tokens],
    }
    row_parts = {
        "packing": [asdict(packing), asdict(contract), config.keys, config.packing.window],
        # Which stages get whole rows changes no row.
        "layout": [{name: value for name, value in asdict(layout).items() if name != "mtp_stages"}, cost.linear],
    }
    return StreamFingerprint.of(sample_parts, row_parts)
