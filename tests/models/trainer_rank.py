"""One rank of a Hugging Face Trainer job on gloo: train, stop between two checkpoints, go on from the last.

``python -m tests.models.trainer_rank ENDPOINT OUTPUT_FOLDER {fresh,resume}`` with torchrun's variables set.
What the model was really called with ends in ``calls-PHASE-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from packhorse import Feed, ParallelLayout
from packhorse.hf import attach

__all__ = ["LEARNING_RATE", "SAVE_STEPS", "STOP_AFTER", "make_model"]

SAVE_STEPS, STOP_AFTER = 2, 3  # stops one step behind its only checkpoint
MAX_STEPS = 50  # the stream ends earlier
NUM_MICROBATCHES = 3
LEARNING_RATE = 0.5


def make_model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


class StopHere(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Ends training in the middle."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        control.should_training_stop = state.global_step == STOP_AFTER


def record(model: Any, calls: list[dict[str, Any]], trainer: Trainer) -> None:
    """Note every call of the model, whoever makes it."""

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        kept = {name: kwargs[name].clone() for name in ("input_ids", "position_ids", "shift_labels")}
        calls.append({"step": trainer.state.global_step, "items": float(kwargs["num_items_in_batch"]), **kept})

    model.register_forward_pre_hook(note, with_kwargs=True)


def main(endpoint: str, folder: Path, phase: str) -> None:
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store-{phase}", rank=rank, world_size=2)
    arguments = TrainingArguments(
        output_dir=str(folder / "job"),
        use_cpu=True,
        max_steps=MAX_STEPS,
        ignore_data_skip=True,
        gradient_accumulation_steps=NUM_MICROBATCHES,
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=SAVE_STEPS,
        report_to=[],
        disable_tqdm=True,
    )
    calls: list[dict[str, Any]] = []
    model = make_model()
    with Feed(endpoint, layout=ParallelLayout(data=2), start_timeout=60, stall_timeout=60) as feed:
        trainer = Trainer(model, arguments, callbacks=[StopHere()] if phase == "fresh" else [])
        attach(trainer, feed)
        record(model, calls, trainer)
        trainer.train(resume_from_checkpoint=phase == "resume" or None)
    torch.save(calls, folder / f"calls-{phase}-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
