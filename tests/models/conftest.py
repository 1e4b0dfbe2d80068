"""A small corpus, what a server made of it, and each sample on its own as the truth to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from packhorse import Feed, MicroBatch
from tests.harness import DEADLINE_S, running_server, write_config
from tests.service.shards_on_disk import ids_member, write_tar

VOCAB_SIZE = 97
CONTRACT = {"seq_length": 64, "global_batch_size": 6, "vocab_size": VOCAB_SIZE, "segment_multiple": 4}


@dataclass(frozen=True)
class Sample:
    """One sample as it lies on disk, shifted: int64 [n], int64 [n], and float32 [n], 1 where trained on."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Corpus:
    """A folder of shards, and its samples."""

    folder: Path
    samples: tuple[Sample, ...]

    @property
    def num_loss_tokens(self) -> int:
        return int(sum(sample.mask.sum() for sample in self.samples))

    def config(self, **layout: int) -> Path:
        """A server's configuration for it."""
        sources = {"a": {"shards": "a-*.tar"}}
        return write_config(self.folder, contract=CONTRACT, layout=layout, loading={"workers": 0}, sources=sources)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two shards of 20 samples; every third one is trained on in part."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(11)
    samples = []
    for shard in range(2):
        files: list[tuple[str, bytes]] = []
        for i in range(20):
            length = int(generator.integers(3, 45))
            ids = generator.integers(1, VOCAB_SIZE, length)
            mask = generator.integers(0, 2, length) if i % 3 == 0 else np.ones(length, int)
            files += [(f"{i}.npy", ids_member(ids.tolist())), (f"{i}.loss_mask.npy", ids_member(mask.tolist()))]
            row = torch.from_numpy(ids)
            samples.append(Sample(row[:-1], row[1:], torch.from_numpy(mask[1:]).float()))
        write_tar(folder / f"a-{shard}.tar", files)
    return Corpus(folder, tuple(samples))


@pytest.fixture(scope="session")
def micro_batches(corpus: Corpus) -> list[MicroBatch]:
    """The whole stream as one rank gets it, fillers included."""
    with running_server(corpus.config()) as server, Feed(server.endpoint, start_timeout=DEADLINE_S) as feed:
        received = list(feed)
    assert any(mb.filler for mb in received)
    assert max(len(mb.cu_seqlens) for mb in received) > 3
    return received
