"""Data for a load test that has none: pre-tokenised shards of log-normal lengths, the same for the same seed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from packhorse.contract.layout import ParallelLayout
from packhorse_service.loadtest.scenario.scenario import SyntheticConfig
from packhorse_service.sources.npy import dump_array

__all__ = ["write_synthetic_feed"]

SHARDS = 4
SAMPLES, TOKENS = 8_000, 4_000_000  # at most, in all; then they come again
SIGMA = 1.2  # of the logarithm of lengths, as instruction data has it
LEAST_IDS = 2  # one input, one target


def write_synthetic_feed(
    folder: Path,
    synthetic: SyntheticConfig,
    layout: ParallelLayout,
    seed: int,
    *,
    curve: Mapping[str, str] | None = None,
) -> Path:
    """Write shards and the ``feed.yaml`` that serves them without end, with the keys that ``curve`` names; its path."""
    rng = np.random.default_rng(seed)
    for shard in range(SHARDS):
        _write_shard(folder / f"synthetic-{shard:06d}.tar", synthetic, rng)
    feed: dict[str, Any] = {
        "seed": seed,
        "layout": {
            "data": layout.data,
            "context": layout.context,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
        },
        "contract": {
            "seq_length": synthetic.seq_length,
            "global_batch_size": layout.data * synthetic.micro_batches,
            "vocab_size": synthetic.vocab_size,
        },
        "sources": {"synthetic": {"shards": "synthetic-*.tar", "epochs": "endless", "over_length": "truncate_right"}},
    }
    if curve is not None:
        feed["curve"] = dict(curve)
    path = folder / "feed.yaml"
    path.write_text(yaml.safe_dump(feed, sort_keys=False), encoding="utf-8")
    return path


def _write_shard(path: Path, synthetic: SyntheticConfig, rng: np.random.Generator) -> None:
    samples = max(min(SAMPLES, TOKENS // synthetic.mean_length) // SHARDS, 1)
    lengths = rng.lognormal(np.log(synthetic.mean_length) - SIGMA**2 / 2, SIGMA, samples).astype(np.int64)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, length in enumerate(np.clip(lengths, LEAST_IDS, synthetic.seq_length + 1)):
            data = dump_array(rng.integers(0, synthetic.vocab_size, length, dtype=np.uint32))
            header = tarfile.TarInfo(f"{number:06d}.npy")
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
