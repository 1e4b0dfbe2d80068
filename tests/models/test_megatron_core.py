"""A Megatron-Core GPTModel with THD ``PackedSeqParams``, fed by a real server: packed equals unpacked.

Megatron's own attention cores need CUDA, or refuse packed data, so the model has one of its own here that
reads the offsets; embedding, THD rotary positions, layers and loss are Megatron's. Transformer Engine's
kernels and its cut of rows over context-parallel ranks need GPUs and are not run here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, not listed in __all__
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("megatron.core", exc_type=ImportError)

with warnings.catch_warnings():
    # Megatron warns at import of accelerator libraries that are not here, and of its own old module names.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

from packhorse import MicroBatch
from packhorse.adapters.megatron_core import packed_seq_params
from packhorse.contract.batch_contract import AttentionOffsets
from tests.models.comparing import TOLERANCE, Outcome, outcome
from tests.models.conftest import VOCAB_SIZE, Corpus

# Megatron's layers call one another in ways that Megatron has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]


class OffsetAttention(torch.nn.Module):
    """Causal attention within each segment of ``PackedSeqParams``, or over the whole sequence without any."""

    def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, query: Any, key: Any, value: Any, _mask: Any, *_args: Any, packed_seq_params: Any = None, **_kwargs: Any
    ) -> torch.Tensor:
        """THD [T, heads, dim] to [T, heads·dim] with offsets, SBHD [s, 1, heads, dim] to [s, 1, heads·dim] without."""
        if packed_seq_params is None:
            return attend(query[:, 0], key[:, 0], value[:, 0])[:, None]
        padded = packed_seq_params.cu_seqlens_q_padded
        offsets = (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
        lengths = [end - start for start, end in itertools.pairwise(offsets)]
        segments = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([attend(*segment) for segment in segments])


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[n, heads, dim] to [n, heads·dim]."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return (
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
    )


@pytest.fixture(scope="module", autouse=True)
def one_rank_on_the_cpu() -> Iterator[None]:
    """Megatron's groups of one rank; it asks CUDA for the device of rotary positions, whatever the model is on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def gpt() -> Any:
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = OffsetAttention
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        init_method_std=0.2,  # attention matters from the first step on
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        cuda_graph_scope=[],  # its default warns of itself
    )
    return GPTModel(config, spec, VOCAB_SIZE, max_sequence_length=64, position_embedding_type="rope")


def unpacked(model: Any, corpus: Corpus) -> Outcome:
    """Every sample alone, without packing metadata."""

    def losses() -> Iterator[torch.Tensor]:
        for sample in corpus.samples:
            positions = torch.arange(len(sample.tokens))
            per_slot = model(sample.tokens[None], positions[None], None, labels=sample.labels[None])[0]
            yield (per_slot * sample.mask).sum() / corpus.num_loss_tokens

    return outcome(model, losses())


def packed(model: Any, rows: list[tuple[MicroBatch, Any]]) -> Outcome:
    """Each row as a Megatron step forwards it; [T] becomes [1, T]."""
    num_loss_tokens = sum({mb.step: mb.step_loss_tokens for mb, _ in rows}.values())

    def losses() -> Iterator[torch.Tensor]:
        for mb, params in rows:
            inputs = (mb.tokens[None], mb.position_ids[None], None)
            per_slot = model(*inputs, labels=mb.labels[None], packed_seq_params=params)[0]
            yield (per_slot * mb.loss_mask).sum() / num_loss_tokens

    return outcome(model, losses())


@pytest.mark.parametrize("offsets", list(AttentionOffsets))
def test_packed_rows_train_as_their_samples_do_alone(
    corpus: Corpus, micro_batches: list[MicroBatch], offsets: AttentionOffsets
) -> None:
    model = gpt()
    rows = [(mb, packed_seq_params(mb, attention_offsets=offsets)) for mb in micro_batches]
    assert packed(model, rows).difference(unpacked(model, corpus)) < TOLERANCE


def test_wrong_offsets_are_seen_by_the_comparison(corpus: Corpus, micro_batches: list[MicroBatch]) -> None:
    model = gpt()
    truth = unpacked(model, corpus)
    whole = torch.tensor([0, 64], dtype=torch.int32)
    spoilt: dict[str, Callable[[MicroBatch], Any]] = {
        "no offsets": lambda mb: None,
        "one segment": lambda mb: packed_seq_params(replace(mb, cu_seqlens_padded=whole, max_seqlen=64)),
        "off by one": lambda mb: packed_seq_params(
            replace(mb, cu_seqlens_padded=_moved(mb.cu_seqlens_padded), max_seqlen=mb.max_seqlen + 1)
        ),
    }
    differences = {
        name: packed(model, [(mb, spoil(mb)) for mb in micro_batches]).difference(truth)
        for name, spoil in spoilt.items()
    }
    assert min(differences.values()) > 1000 * TOLERANCE, differences


def _moved(offsets: torch.Tensor) -> torch.Tensor:
    """Inner offsets one slot to the right."""
    moved = offsets.clone()
    moved[1:-1] += 1
    return moved
