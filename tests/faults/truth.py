"""What a run must deliver, by an undisturbed run of the pipeline in this process, and by ``tarfile`` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from packhorse import ParallelLayout, Position
from packhorse.codec.rebuild import Rebuilder
from packhorse_service.config.serve_config import load_config
from packhorse_service.framing import view_key
from packhorse_service.pipeline.plan import plan_stream
from packhorse_service.pipeline.run import Pipeline
from packhorse_service.row_digests import local_digest
from tests.service.corpus import Pair, damage, inline_engine, random_lengths, read_shards, write_source

SEQ_LENGTH = 64
FAULTY = "0003"  # the sample of one shard that cannot be read


@dataclass(frozen=True)
class Truth:
    """A corpus on disk, the configuration that serves it, and what comes of it."""

    config: Path
    layout: ParallelLayout
    digests: Mapping[int, Mapping[Position, str]]  # rank -> position -> local digest
    stored: Counter[Pair]

    @classmethod
    def written(cls, folder: Path, samples: int, **settings: Any) -> Self:
        """Two sources of ids that never come twice: one with prompts, one with samples to cut and one to skip."""
        plain = write_source(folder / "plain", random_lengths(1, 3, samples, longest=SEQ_LENGTH), masked=True)
        mixed = write_source(folder / "mixed", random_lengths(2, 2, samples, longest=150), first=30_000)
        sound = [s for s in read_shards([*plain, *mixed]) if (s.shard, s.key, s.ids[0] >= 30_000) != BAD]
        stored = Counter(pair for sample in sound for pair in sample.pairs())
        damage(mixed[1], f"{FAULTY}.npy")
        return cls.of(write_feed(folder, **settings), stored)

    @classmethod
    def of(cls, config: Path, stored: Counter[Pair]) -> Self:
        """What an undisturbed run of this configuration delivers."""
        return cls(config, load_config(config).layout, _undisturbed(config), stored)

    def with_workers(self, workers: int, scheme: str = "") -> Path:
        """The same stream, read by so many loader processes, and through a file system of that scheme."""
        described = yaml.safe_load(self.config.read_text())
        described["loading"]["workers"] = workers
        for name, source in described["sources"].items() if scheme else ():
            source["shards"] = [f"{scheme}://{path}" for path in sorted(self.config.parent.glob(f"{name}/*.tar"))]
        path = self.config.with_name(f"feed-{workers}{scheme}.yaml")
        path.write_text(yaml.safe_dump(described, sort_keys=False))
        return path

    @property
    def num_microbatches(self) -> int:
        return 1 + max(position.index for position in self.digests[0])

    @property
    def steps(self) -> int:
        return 1 + max(position.step for position in self.digests[0])


BAD = ("part-001.tar", FAULTY, True)


def write_feed(folder: Path, name: str = "feed.yaml", **settings: Any) -> Path:
    """A configuration of the corpus in ``folder``; ``contract`` adds to what stands here."""
    contract = {"seq_length": SEQ_LENGTH, "global_batch_size": 4, "vocab_size": 60_000, **settings.pop("contract", {})}
    described = {
        "listen": "tcp://127.0.0.1:*",
        "layout": {"data": 2},
        "contract": contract,
        "sources": {
            "plain": {"shards": "plain/part-*.tar", "weight": 2},
            "mixed": {"shards": "mixed/part-*.tar", "over_length": "split", "skip_budget": 1},
        },
        "loading": {"workers": 0, "block_bytes": 4096},
        "rejoin_after_s": 2,
        **settings,
    }
    path = folder / name
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return path


def _undisturbed(config: Path) -> dict[int, dict[Position, str]]:
    plan = plan_stream(load_config(config), config.parent)
    pipeline = Pipeline(plan, inline_engine(plan))
    digests: dict[int, dict[Position, str]] = {rank: {} for rank in range(plan.layout.world_size)}
    while (step := pipeline.next_step()) is not None:
        for rank, of_rank in digests.items():
            at = plan.layout.coordinates(rank)
            for view in step.views_of(view_key(at, plan.contract, plan.layout)):
                payload = memoryview(view.payload)
                micro_batch = Rebuilder(plan.contract, plan.layout, at.context).rebuild(view.body, payload)
                of_rank[micro_batch.position] = local_digest(micro_batch).hex()
    return digests
