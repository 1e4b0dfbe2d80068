"""Real shards and real chat files, which nobody here wrote, through ``packhorse serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from packhorse import BatchContract, MicroBatch, ParallelLayout
from packhorse_service.prepare.prepare import prepare
from tests.harness import failing_server, read_rank, running_server, write_config
from tests.shared_data import shared

CONTRACT = {"seq_length": 4096, "global_batch_size": 4}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer, from its published vocabulary, with ChatML's markers."""
    files = shared("data/tokenizers/gpt2")
    tokenizer = Tokenizer(models.BPE.from_file(str(files / "encoder.json"), str(files / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])  # as whoever trains it on chats does
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def served(folder: Path, tokenizer: Path, **source: Any) -> list[MicroBatch]:
    config = write_config(
        folder,
        tokenizer=str(tokenizer),
        contract=CONTRACT,
        keys=True,
        sources={"real": {"over_length": "split", **source}},
    )
    with running_server(config) as server:
        return read_rank(server.endpoint, ParallelLayout(), 0, BatchContract())


def texts(micro_batches: list[MicroBatch], tokenizer: Path) -> list[str]:
    """Every delivered segment, decoded from its tokens and its last label."""
    decode = Tokenizer.from_file(str(tokenizer)).decode
    found = []
    for mb in micro_batches:
        if mb.filler:
            continue
        for start, length in zip(
            mb.cu_seqlens_padded[:-1].tolist(), (mb.cu_seqlens[1:] - mb.cu_seqlens[:-1]).tolist(), strict=True
        ):
            if length:
                ids = [*mb.tokens[start : start + length].tolist(), int(mb.labels[start + length - 1])]
                found.append(decode(ids, skip_special_tokens=False))
    return found


@pytest.mark.parametrize(("name", "samples"), [("testgz.tar", 1000), ("compressed.tar", 3)])
def test_published_text_shards_stream(tmp_path: Path, gpt2: Path, name: str, samples: int) -> None:
    delivered = served(tmp_path, gpt2, shards=str(shared(f"data/wds/{name}")))
    assert len({key for mb in delivered for key in mb.keys}) == samples
    assert all(texts(delivered, gpt2))


@pytest.mark.parametrize(("name", "member"), [("tendata.tar", ".ten"), ("mpdata.tar", ".mp")])
def test_published_shards_without_text_are_refused_by_member(
    tmp_path: Path, gpt2: Path, name: str, member: str
) -> None:
    sources = {"real": {"shards": str(shared(f"data/wds/{name}"))}}
    printed = failing_server(write_config(tmp_path, tokenizer=str(gpt2), contract=CONTRACT, sources=sources))
    for words in (name, member, ".txt", ".json", ".npy"):
        assert words in printed


@pytest.mark.parametrize(
    ("name", "field", "samples", "phrase"),
    [
        ("dummy_conversation.json", None, 500, "I am Vicuna"),
        ("glaive_toolcall_en_demo.json", None, 300, "search_recipes"),
        ("tau_bench_gpt-4o-airline.json", None, 200, "book_reservation"),
        ("oasst_en_100_tree.jsonl", None, 626, "401k"),
        ("mt_bench_question.jsonl", "turns", 80, "Hawaii"),
    ],
)
def test_published_chat_files_stream_after_prepare(
    tmp_path: Path, gpt2: Path, name: str, field: str | None, samples: int, phrase: str
) -> None:
    outcome = ["reward", "trial", "info"]  # of an agent's trajectory
    source = shared(f"data/chat/{name}")
    summary = prepare([source], tmp_path, name="chat", field=field, ignore_fields=outcome, progress=False)
    assert summary.samples == samples
    delivered = served(tmp_path, gpt2, shards="chat-*.tar")
    assert len({key for mb in delivered for key in mb.keys}) == samples
    written = texts(delivered, gpt2)
    assert any(phrase in text for text in written)
    supervised = sum(mb.num_loss_tokens for mb in delivered)
    total = sum(mb.num_tokens for mb in delivered if not mb.filler)
    # Only what an assistant says is trained on; the questions of mt_bench have no answers.
    assert (supervised == 0) == (field == "turns")
    assert supervised < total
