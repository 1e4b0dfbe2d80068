"""A Transformers Llama, fed by a real server: packed equals unpacked, and what spoils it is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from packhorse import ContractError, MicroBatch, Partition
from packhorse.hf import arguments
from tests.models.comparing import TOLERANCE, Outcome, outcome
from tests.models.conftest import VOCAB_SIZE, Corpus


def llama(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # attention matters from the first step on
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def unpacked(model: Any, corpus: Corpus) -> Outcome:
    """Every sample alone, with a loss written out here."""

    def losses() -> Iterator[torch.Tensor]:
        for sample in corpus.samples:
            logits = model(input_ids=sample.tokens[None], use_cache=False).logits[0]
            loss = cross_entropy(logits, sample.labels, reduction="none")
            yield (loss * sample.mask).sum() / corpus.num_loss_tokens

    return outcome(model, losses())


def packed(model: Any, inputs: Iterator[dict[str, Any]], num_loss_tokens: int) -> Outcome:
    return outcome(model, (model(**kwargs, num_items_in_batch=num_loss_tokens).loss for kwargs in inputs))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_train_as_their_samples_do_alone(
    corpus: Corpus, micro_batches: list[MicroBatch], attention: str
) -> None:
    model = llama(attention)
    truth = unpacked(model, corpus)
    steps = {mb.step: mb.step_loss_tokens for mb in micro_batches}
    assert sum(steps.values()) == corpus.num_loss_tokens
    got = packed(model, map(arguments, micro_batches), corpus.num_loss_tokens)
    assert got.difference(truth) < TOLERANCE


def with_ones_as_mask(_mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])}


def without_positions(_mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "position_ids"}


def with_cache(_mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "use_cache": True}


def with_unmasked_labels(mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "shift_labels": mb.labels[None]}


def with_labels_shifted_twice(_mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "shift_labels"}


def with_boolean_mask(mb: MicroBatch, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Right for sdpa; eager attention adds it as a number."""
    segment = torch.bucketize(torch.arange(mb.width), mb.cu_seqlens_padded[1:], right=True)
    return {**kwargs, "attention_mask": (segment[:, None] == segment).tril()[None, None]}


Spoil = Callable[[MicroBatch, dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("spoil", "attention"),
    [
        (with_ones_as_mask, "sdpa"),
        (without_positions, "sdpa"),
        (with_cache, "sdpa"),
        (with_unmasked_labels, "sdpa"),
        (with_labels_shifted_twice, "sdpa"),
        (with_boolean_mask, "eager"),
    ],
)
def test_what_would_train_wrong_in_silence_is_seen_by_the_comparison(
    corpus: Corpus, micro_batches: list[MicroBatch], spoil: Spoil, attention: str
) -> None:
    model = llama(attention)
    inputs = (spoil(mb, arguments(mb)) for mb in micro_batches)
    assert packed(model, inputs, corpus.num_loss_tokens).difference(unpacked(model, corpus)) > 1000 * TOLERANCE


def test_arguments_have_the_spelling_and_shapes_of_transformers(micro_batches: list[MicroBatch]) -> None:
    mb = micro_batches[0]
    kwargs = arguments(mb)
    assert kwargs.keys() == {
        *("input_ids", "position_ids", "labels", "shift_labels", "use_cache"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
    for name in ("input_ids", "position_ids", "labels"):
        assert (kwargs[name].dtype, kwargs[name].shape) == (torch.int64, (1, 64))
    assert kwargs["labels"] is kwargs["shift_labels"]
    assert kwargs["cu_seq_lens_q"] is mb.cu_seqlens_padded
    assert kwargs["max_length_k"] == mb.max_seqlen


def test_labels_are_rolled_for_a_loss_that_shifts_them_and_a_full_row_is_refused(
    micro_batches: list[MicroBatch],
) -> None:
    model = llama()
    with_tail = [mb for mb in micro_batches if int(mb.masked_labels()[-1]) == mb.ignore_index]
    full = [mb for mb in micro_batches if int(mb.masked_labels()[-1]) != mb.ignore_index]
    assert full
    assert any(not mb.filler for mb in with_tail)
    rolled = packed(model, (arguments(mb, shift_labels=False) for mb in with_tail), 1)
    assert rolled.difference(packed(model, map(arguments, with_tail), 1)) < TOLERANCE
    with pytest.raises(ContractError, match=r"last slot has a target.*shift_labels"):
        arguments(full[0], shift_labels=False)


def test_a_slice_and_another_ignore_index_are_refused(micro_batches: list[MicroBatch]) -> None:
    mb = micro_batches[0]
    with pytest.raises(ContractError, match="slice"):
        arguments(replace(mb, partition=Partition.ZIGZAG, context_size=2))
    with pytest.raises(ContractError, match="ignore_index=0 must be -100"):
        arguments(replace(mb, ignore_index=0))
