"""Train a Transformers model on packed rows with ``Trainer``: plain data parallelism under torchrun.

    packhorse serve feed.yaml
    torchrun --nproc-per-node 8 train_transformers.py --endpoint tcp://127.0.0.1:5555 --model Qwen/Qwen2.5-0.5B \\
        --steps 1000 --accumulation 8

``attach`` is all that Packhorse takes: it gives the trainer its batches, and puts the feed's place into the trainer's
checkpoints. Started again it goes on from the last one. Rows must be ``partition: whole``, which is the default. On a
GPU choose ``--attention flash_attention_2``: it reads the offsets of the segments, where ``sdpa`` finds them by their
positions. Run on CPUs by the tests, not on a GPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from packhorse import Feed, ParallelLayout
from packhorse.hf import attach


def main() -> None:
    args = arguments()
    training = TrainingArguments(
        output_dir=str(args.checkpoints),
        max_steps=args.steps,  # a stream has no length that a Trainer could know
        ignore_data_skip=True,  # the feed resumes by itself
        gradient_accumulation_steps=args.accumulation,  # global_batch_size / ranks
        learning_rate=args.learning_rate,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_steps=args.save_every,
        logging_steps=1,
        report_to=[],
    )
    with Feed(args.endpoint, layout=ParallelLayout(data=training.world_size)) as feed:
        trainer = Trainer(model_of(args), training)
        attach(trainer, feed)
        last = get_last_checkpoint(args.checkpoints) if args.checkpoints.exists() else None
        trainer.train(resume_from_checkpoint=last)


def model_of(args: argparse.Namespace) -> Any:
    """A pretrained model, or a tiny new one to try the loop with."""
    if args.model is not None:
        return AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.attention)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=args.vocabulary, attn_implementation=args.attention, **sizes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a causal language model on packed rows with Trainer.")
    endpoint = os.environ.get("PACKHORSE_ENDPOINT")
    parser.add_argument("--endpoint", default=endpoint, help="of packhorse serve; default: $PACKHORSE_ENDPOINT")
    parser.add_argument("--model", help="name or folder of a pretrained model; left out: a tiny new one")
    parser.add_argument("--attention", default="sdpa", help="sdpa, eager or flash_attention_2")
    parser.add_argument("--vocabulary", type=int, default=50304, help="ids of the tiny model")
    parser.add_argument("--steps", type=int, required=True, help="to train for; it also ends where the stream does")
    parser.add_argument("--accumulation", type=int, required=True, help="micro-batches of a rank in a step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder that all ranks see")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args()
    if not args.endpoint:
        parser.error("--endpoint is missing, and PACKHORSE_ENDPOINT is not set")
    return args


if __name__ == "__main__":
    main()
