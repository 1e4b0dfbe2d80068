"""Train a GPT of Megatron-Core on packed rows: data, tensor, context and pipeline parallel.

    packhorse serve feed.yaml
    torchrun --nproc-per-node 8 train_megatron.py --endpoint tcp://127.0.0.1:5555 --tensor 2 --context 2 \\
        --seq-length 8192 --global-batch-size 64

The feed's layout is ``{data: 2, tensor: 2, context: 2, sequence_parallel: true}``, and its contract has ``partition:
zigzag`` and ``loss_reduction: per_token``. What Packhorse takes of it: the contract, the ``Feed``, each step's
micro-batches as the schedule's iterator, ``packed_seq_params``, and the feed's state in the checkpoint.

Not run on a GPU. The tests run it on a CPU with an attention of their own in the place of Transformer Engine's, one
rank wide.

Stacks with a loop of their own take an iterator. Megatron-LM: ``--dataloader-type external``, and a provider of data
sets that returns ``map(packhorse.adapters.megatron_lm.batch, feed), None, None`` on tensor rank 0. Megatron-Bridge:
``dataloader_type="external"`` of a data set whose configuration has ``enable_offline_packing`` and
``offline_packing_specs``, and whose builder returns ``map(packhorse.adapters.megatron_bridge.batch, feed)``. What they
rely on is declared by
``BatchContract.from_megatron(args)`` and ``.from_megatron_bridge(cfg)``, and the same of ``ParallelLayout``.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from packhorse import BatchContract, Feed, LossReduction, MicroBatch, ParallelLayout, Partition
from packhorse.adapters.megatron_core import packed_seq_params

log = logging.getLogger("train")

RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}  # resumes on other layouts, as the feed does


def main() -> None:
    args = arguments()
    layout = join_the_others(args)
    model = make_model(args, layout)
    optimizer = make_optimizer(args, model)
    contract = BatchContract(
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        partition=Partition.ZIGZAG,  # each context-parallel rank gets its own slots, cut segment by segment
        loss_reduction=LossReduction.PER_TOKEN,  # finalize_model_grads divides by the trained tokens of all ranks
    )
    with Feed(args.endpoint, contract=contract, layout=layout) as feed:
        checkpoint = Checkpoint(args.checkpoints, model, optimizer, feed)
        checkpoint.load()
        trained = 0
        for step in feed.steps():
            loss = train_step(model, optimizer, step, args.seq_length)
            trained = step[0].step + 1
            if loss is not None:
                log.info("step %d: loss %.4f, %d tokens", step[0].step, loss, step[0].step_loss_tokens)
            if trained % args.save_every == 0:
                checkpoint.save(trained)
        if trained % args.save_every:  # the stream has ended in between
            checkpoint.save(trained)
    dist.destroy_process_group()


def train_step(model: Any, optimizer: Any, step: Sequence[MicroBatch], seq_length: int) -> float | None:
    """One step of the schedule; its loss per trained token, on the last pipeline stage."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(step),  # a virtual pipeline takes one for each model chunk: a list of iter(step)
        model=[model],
        num_microbatches=len(step),
        seq_length=seq_length,
        micro_batch_size=1,
    )
    optimizer.step()
    if not parallel_state.is_pipeline_last_stage():
        return None
    total = torch.stack([report["loss"] for report in reports]).sum()
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total) / max(step[0].step_loss_tokens, 1)


def forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """What the schedule calls for each micro-batch: the losses of this rank's slots, and how to sum them."""
    mb = next(micro_batches).to(torch.cuda.current_device())
    # A stage of the pipeline holds what it uses: the first one tokens and positions, the last one labels.
    tokens, positions, labels = (x if x is None else x[None] for x in (mb.tokens, mb.position_ids, mb.labels))
    output = model(tokens, positions, None, labels=labels, packed_seq_params=packed_seq_params(mb))
    return output, partial(sum_losses, mb)


def sum_losses(mb: MicroBatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss of this rank's slots [1, T / CP], how many are trained on, and what to report."""
    loss = (losses.view(-1).float() * mb.loss_mask).sum()
    tokens = torch.tensor(mb.local_loss_tokens, dtype=torch.int, device=losses.device)
    return loss, tokens, {"loss": loss.detach()}


class Checkpoint:
    """Model, optimizer and the place in the data: a folder for each, and the name of the last whole one."""

    def __init__(self, folder: Path, model: Any, optimizer: Any, feed: Feed) -> None:
        self._folder, self._model, self._optimizer, self._feed = folder, model, optimizer, feed
        self._latest = folder / "latest"

    def load(self) -> None:
        """Go on from the last one, if there is one; on all ranks, before the first step."""
        if not self._latest.exists():
            return
        folder = self._folder / self._latest.read_text().strip()
        saved = dist_checkpointing.load(self._sharded(loading=True), str(folder))
        self._model.module.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._feed.load_state_dict(saved["feed"])
        log.info("going on at step %d", self._feed.position.step)

    def save(self, trained: int) -> None:
        """Collective: each rank writes its shards."""
        name = f"step-{trained:06d}"
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save({**self._sharded(), "feed": self._feed.state_dict()}, str(self._folder / name))
        if dist.get_rank() == 0:
            part = self._latest.with_suffix(".part")
            part.write_text(name + "\n")
            part.replace(self._latest)

    def _sharded(self, loading: bool = False) -> dict[str, Any]:
        model = self._model.module.sharded_state_dict(metadata=RESHARDABLE)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=loading, metadata=RESHARDABLE)
        return {"model": model, "optimizer": optimizer}


def join_the_others(args: argparse.Namespace) -> ParallelLayout:
    """Meet the other ranks as torchrun arranged it, and take places as Megatron's default order has them."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.pipeline,
        context_parallel_size=args.context,
    )
    model_parallel_cuda_manual_seed(args.seed)
    logging.basicConfig(level=logging.INFO if dist.get_rank() == dist.get_world_size() - 1 else logging.WARNING)
    return ParallelLayout(
        data=parallel_state.get_data_parallel_world_size(),
        context=args.context,
        tensor=args.tensor,
        pipeline=args.pipeline,
        sequence_parallel=args.tensor > 1,
    )


def make_model(args: argparse.Namespace, layout: ParallelLayout) -> Any:
    """This rank's part of the model: yours, in its place."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,  # a mean over each rank's own slots would weigh tokens by where they were cut
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),  # its attention reads the offsets; the local one refuses them
        args.vocabulary,
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=args.distributed_optimizer)
    return DistributedDataParallel(config, sharded, Float16Module(config, model.cuda()))


def make_optimizer(args: argparse.Namespace, model: Any) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.learning_rate,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, [model])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT of Megatron-Core on packed rows.")
    endpoint = os.environ.get("PACKHORSE_ENDPOINT")
    parser.add_argument("--endpoint", default=endpoint, help="of packhorse serve; default: $PACKHORSE_ENDPOINT")
    parser.add_argument("--seq-length", type=int, required=True, help="slots of a row, as the server packs them")
    parser.add_argument("--global-batch-size", type=int, required=True, help="rows of a step, over all ranks")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--context", type=int, default=1, help="context-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--vocabulary", type=int, default=50304, help="ids of the tokenizer, padded")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    yes_or_no = argparse.BooleanOptionalAction
    parser.add_argument("--distributed-optimizer", action=yes_or_no, default=True, help="shard its state over ranks")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder that all ranks see")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    if not args.endpoint:
        parser.error("--endpoint is missing, and PACKHORSE_ENDPOINT is not set")
    return args


if __name__ == "__main__":
    main()
