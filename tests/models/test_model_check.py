"""A model that trains across samples is refused before training, whatever wraps it; others are left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch.distributed.fsdp import fully_shard
from transformers import OPTConfig, OPTForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from packhorse import BatchContract, ConfigError, Feed, MicroBatch, Packing
from packhorse.hf import arguments, attach, check
from packhorse.hf import model_check as checking
from packhorse.rules.transformers_families import Separation
from tests.models.comparing import TOLERANCE, outcome
from tests.models.conftest import VOCAB_SIZE, Corpus
from tests.models.test_hf_trainer import GOOD, trainer_of
from tests.models.test_llama import llama, unpacked
from tests.models.tiny_models import shrunk


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    checking._checked.cache_clear()
    yield
    checking._checked.cache_clear()


def opt() -> Any:
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(vocab_size=VOCAB_SIZE, word_embed_proj_dim=16, max_position_embeddings=64, **sizes))


class Causal(torch.nn.Module):
    """A model of nobody's library; each slot adds up the ids before it, of its own sample or of the whole row."""

    calls: torch.Tensor

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, 8)
        self.head = torch.nn.Linear(8, VOCAB_SIZE)
        self.register_buffer("calls", torch.zeros(()))
        self.apart = apart

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        self.calls += 1
        self.seen = input_ids
        sample = (position_ids == 0).cumsum(-1)
        visible = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril()
        if self.apart:
            visible = visible * (sample[0][:, None] == sample[0])
        noise = torch.rand(()) if self.training else torch.ones(())
        return SimpleNamespace(logits=self.head(visible @ self.embedding(input_ids)[0] * noise)[None])


def qwen() -> Any:
    """A Qwen2.5-VL whose attention matters."""
    config = shrunk(Qwen2_5_VLConfig(), {})
    config.text_config.rope_parameters["mrope_section"] = [1, 1, 2]
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model


def test_a_family_that_trains_across_samples_is_refused_by_name_with_the_way_out(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, **GOOD)
    trainer.model = opt()
    named = r"(?s)opt with attn_implementation=sdpa trains across the samples.*contract\.packing: none"
    with Feed("tcp://127.0.0.1:9") as feed, pytest.raises(ConfigError, match=named):
        attach(trainer, feed)


def test_it_trains_where_rows_are_declared_not_to_be_packed(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, **GOOD)
    trainer.model = opt()
    with Feed("tcp://127.0.0.1:9", contract=BatchContract(packing=Packing.NONE)) as feed:
        attach(trainer, feed)


def test_arguments_refuse_it_too(micro_batches: list[MicroBatch]) -> None:
    with pytest.raises(ConfigError, match="opt with"):
        arguments(micro_batches[0], model=opt())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own modules
@pytest.mark.parametrize("wrap", [torch.compile, lambda model: Wrapper(model), lambda model: Wrapper(Wrapper(model))])
def test_wrapped_models_are_found(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="opt with"):
        check(wrap(opt()))
    assert check(wrap(llama())).separation is Separation.SEPARATE


class Wrapper(torch.nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_models_of_nobody_s_library_are_measured() -> None:
    assert check(Causal(apart=True)).separation is Separation.SEPARATE
    with pytest.raises(ConfigError, match=r"Causal with .* trains across"):
        check(Causal(apart=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_hides_no_crossing(dtype: torch.dtype) -> None:
    assert check(llama().to(dtype)).separation is Separation.SEPARATE
    with pytest.raises(ConfigError, match="opt with"):
        check(opt().to(dtype))


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_as_it_was(training: bool) -> None:
    model = Causal(apart=True).train(training)
    model.head.train(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    attributes, numbers = {*vars(model)}, (torch.get_rng_state(), random.getstate())
    check(model)
    assert {*vars(model)} == attributes
    assert (model.training, model.head.training, float(model.calls)) == (training, False, 0)
    assert model.embedding.weight.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]


def test_of_a_large_model_the_table_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_PARAMETERS", 0)
    with pytest.raises(ConfigError, match="opt with"):
        check(opt())
    assert check(llama()).separation is Separation.SEPARATE


class Derived(OPTForCausalLM):  # type: ignore[misc]  # transformers is untyped here
    """A class of one's own, which may compute anything."""


def test_the_table_does_not_speak_for_a_class_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_PARAMETERS", 0)
    with pytest.warns(UserWarning, match="Derived is not one of"):
        assert check(Derived(opt().config)).separation is Separation.UNKNOWN


@pytest.mark.filterwarnings("ignore")  # of torch.distributed's modules
def test_of_a_sharded_model_the_table_is_asked(tmp_path: Any) -> None:
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = group.device_mesh.init_device_mesh("cpu", (1,))
        with pytest.raises(ConfigError, match=r"opt with .*measured on a tiny model"):
            check(fully_shard(opt(), mesh=mesh))
        with pytest.raises(ConfigError, match=r"opt with .*measured on it"):
            check(torch.nn.parallel.DistributedDataParallel(opt()))
    finally:
        group.destroy_process_group()


def test_what_neither_measurement_nor_table_answers_is_named_as_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_PARAMETERS", 0)
    with pytest.warns(UserWarning, match=r"not checked: whether Causal with .* compare the loss"):
        assert check(Causal(apart=False)).separation is Separation.UNKNOWN


def test_the_table_is_not_taken_for_another_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_PARAMETERS", 0)
    monkeypatch.setattr(checking, "HELD_AGAINST", "0.0")
    with pytest.warns(UserWarning, match="held against transformers"):
        check(llama())
    with pytest.raises(ConfigError, match="opt with"):
        check(opt())


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_mrope_trains_packed_as_its_samples_do_alone(
    corpus: Corpus, micro_batches: list[MicroBatch]
) -> None:
    model = qwen()
    inputs = [arguments(mb, model=model) for mb in micro_batches]
    assert {kwargs["position_ids"].shape[:2] for kwargs in inputs} == {(4, 1)}
    truth = unpacked(model, corpus)
    total = corpus.num_loss_tokens
    packed = outcome(model, (model(**kwargs, num_items_in_batch=total).loss for kwargs in inputs))
    assert packed.difference(truth) < TOLERANCE
    assert {kwargs["position_ids"].shape[:1] for kwargs in map(arguments, micro_batches[:1])} == {(1,)}
