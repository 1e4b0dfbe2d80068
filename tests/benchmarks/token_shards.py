"""The input of the whole path: seeded pre-tokenised WebDataset shards, and what a consumer must have seen of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import webdataset

from tests.benchmarks.consuming import Tally

__all__ = ["PATTERN", "VOCAB_SIZE", "TokenShards"]

SEED = 20261129
MEAN, SIGMA = 500, 1.2  # ids of a sample, log-normal
SHORTEST, LONGEST = 8, 8192
VOCAB_SIZE = 50_000
PATTERN = "part-*.tar"


@dataclass(frozen=True, slots=True)
class TokenShards:
    """Shards in a folder, and their tally."""

    folder: Path
    shards: int
    samples: int  # of each shard
    tally: Tally

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob(PATTERN))

    @classmethod
    def written(cls, folder: Path, shards: int, samples: int, mean: int = MEAN) -> TokenShards:
        """Write them, unless the folder holds them from an earlier run. ``mean``: ids of a sample."""
        manifest = folder / "manifest.json"
        wanted = {"seed": SEED, "shards": shards, "samples": samples, "mean": mean}
        if manifest.exists():
            found = json.loads(manifest.read_text())
            if {name: found.get(name) for name in wanted} == wanted:
                return cls(folder, shards, samples, Tally(**found["tally"]))
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(PATTERN):
            old.unlink()
        random = np.random.default_rng(SEED)
        tally = Tally()
        for shard in range(shards):
            lengths = random.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, samples)
            tally = tally + _write(folder / f"part-{shard:06d}.tar", shard * samples, lengths, random)
        manifest.write_text(json.dumps({**wanted, "tally": asdict(tally)}))
        return cls(folder, shards, samples, tally)


def _write(path: Path, first: int, lengths: npt.NDArray[np.float64], random: np.random.Generator) -> Tally:
    tally = Tally()
    # Times are integers, as `packhorse prepare` writes them: for a float each member gets a PAX header of its own.
    with webdataset.TarWriter(str(path), mtime=0) as writer:
        for number, length in enumerate(np.clip(lengths, SHORTEST, LONGEST).astype(int), first):
            ids = random.integers(0, VOCAB_SIZE, length, np.int32)
            writer.write({"__key__": f"{number:09d}", "npy": ids})
            tally = tally + Tally(1, len(ids) - 1, int(ids[:-1].sum(dtype=np.int64)))
    return tally
