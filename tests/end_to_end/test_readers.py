"""Who reads, what each stage gets, and several iterators over one session, through a real server."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from packhorse import BatchContract, Feed, HandshakeRefused, ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from tests.harness import DEADLINE_S, read_rank, running_server, write_config

CONTRACT = {"seq_length": 256, "global_batch_size": 8, "vocab_size": 1000}
SOURCES = {"a": {"shards": "a-*.tar"}}


def test_only_tensor_rank_0_reads_where_the_contract_says_so(token_shards: Path) -> None:
    layout = ParallelLayout(data=2, tensor=2)
    contract = {**CONTRACT, "readers": "tensor_zero"}
    config = write_config(token_shards, layout={"data": 2, "tensor": 2}, contract=contract, sources=SOURCES)
    with running_server(config) as server:
        with pytest.raises(HandshakeRefused, match="RANKS_AGREE"):
            read_rank(server.endpoint, layout, 1, BatchContract())
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda rank: read_rank(server.endpoint, layout, rank, BatchContract()), (0, 2))
        assert [mb.position for mb in first] == [mb.position for mb in second]
        assert server.process.wait(DEADLINE_S) == 0


def test_stages_of_a_pipeline_get_what_they_use(token_shards: Path) -> None:
    layout = ParallelLayout(pipeline=3)
    contract = {**CONTRACT, "padding_mask": True, "pad_to_max_length": True}
    config = write_config(token_shards, layout={"pipeline": 3}, contract=contract, sources=SOURCES)
    declared = BatchContract(trainer=TrainerFacts(mtp_num_layers=0))
    with running_server(config) as server, ThreadPoolExecutor(3) as pool:
        first, middle, last = pool.map(lambda rank: read_rank(server.endpoint, layout, rank, declared), range(3))
    assert len(first) == len(middle) == len(last) > 0
    for one, two, three in zip(first, middle, last, strict=True):
        assert one.tokens is not None
        assert one.labels is None
        assert two.tokens is two.labels is two.loss_mask is None
        assert three.tokens is None
        assert three.labels is not None
        assert {one.row_digest} == {two.row_digest, three.row_digest}
        for mb in (two, three):
            assert np.array_equal(mb.cu_seqlens_padded, one.cu_seqlens_padded)
            assert np.array_equal(mb.padding_mask, one.padding_mask)


def test_chunks_of_a_virtual_pipeline_read_at_their_own_pace(token_shards: Path) -> None:
    """The first chunk runs up to five ahead of the last; what counts is the slowest."""
    config = write_config(token_shards, contract=CONTRACT, sources=SOURCES)
    with running_server(config) as server:
        with Feed(server.endpoint, arrays="numpy", window=6) as feed:
            first, last = feed.chunks(2)
            seen: dict[str, list[bytes]] = {"first": [], "last": []}
            for mb in first:
                seen["first"].append(mb.row_digest)
                if mb.index % 3 == 2:
                    taken = len(seen["last"])
                    assert feed.position == (taken // 8, taken % 8), "taken means taken by the slowest"
                    seen["last"] += [next(last).row_digest for _ in range(len(seen["first"]) - taken)]
            seen["last"] += [mb.row_digest for mb in last]
            assert next(first, None) is next(last, None) is None
        assert server.process.wait(DEADLINE_S) == 0
    assert seen["first"] == seen["last"]
    assert len(set(seen["first"])) == len(seen["first"])


PEERS = """
import sys
import torch.distributed as dist
from packhorse import ContractError, Feed, ParallelLayout
rank, endpoint, store, skips = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with Feed(endpoint, layout=ParallelLayout(tensor=2)) as feed:
    next(feed)
    feed.verify_peers()
    for _ in range(skips if rank == 1 else 0):
        next(feed)
    try:
        feed.verify_peers()
        print("same")
    except ContractError as error:
        print("step 0, index 1" in str(error) and "step 0, index 2" in str(error))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("skips", "said"), [(0, "same"), (1, "True")])
def test_peers_prove_that_they_hold_the_same_micro_batch(token_shards: Path, skips: int, said: str) -> None:
    config = write_config(token_shards, layout={"tensor": 2}, contract=CONTRACT, sources=SOURCES)
    store = token_shards / f"store-{skips}"
    with running_server(config) as server:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PEERS, str(rank), server.endpoint, str(store), str(skips)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    assert [text.strip() for text in printed] == [said, said]
