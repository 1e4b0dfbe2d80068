"""Hugging Face: a micro-batch as a causal model's keyword arguments, and a Feed as a ``Trainer``'s data.

Shapes: MBS rows (1 where rows are packed), T = width in slots, S = segments.

What silently trains across samples, measured against unpacked runs, and is therefore kept away:

* an ``attention_mask``, of ones too: Transformers finds packed rows by their positions only without one;
* a cache: ``use_cache`` is on in most configurations, and packed rows are not looked for beside one;
* ``cu_seq_lens_q`` without ``position_ids``: only the flash kernels read offsets.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import ExportableState, TrainerCallback

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import IGNORE_INDEX
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError, ContractError
from packhorse.feed import Feed

__all__ = ["arguments", "attach"]


def arguments(micro_batch: MicroBatch, *, shift_labels: bool | None = None) -> dict[str, Any]:
    """Return keyword arguments of a causal language model's ``forward``.

    ``input_ids``, ``position_ids``, ``labels`` int64 [MBS, T]; for packed rows ``cu_seq_lens_q`` and ``_k``
    int32 [S+1], physical, and ``max_length_q`` and ``_k``, integers. Labels are ``ignore_index`` wherever
    nothing is trained on, as these models know no loss mask. Pass ``num_items_in_batch`` for the
    denominator: ``Trainer`` does, a loop of one's own passes ``max(micro_batch.step_loss_tokens, 1)``.

    ``shift_labels``: whether the model's loss takes labels that stand at their slot (left out: what the
    installed version's causal loss takes). Where it does not, labels are rolled right by one over the row.

    Raises ``ContractError`` for a slice of a row, for another ``ignore_index`` than -100, and, where labels
    are rolled, for a row whose last slot has a target.
    """
    if not micro_batch.holds_whole_row:
        raise ContractError("partition must be 'whole' for Hugging Face models; this rank was sent a slice of its row")
    if micro_batch.ignore_index != IGNORE_INDEX:  # Trainer counts targets by this number, whatever the loss ignores
        raise ContractError(f"ignore_index={micro_batch.ignore_index} must be {IGNORE_INDEX} for Hugging Face models")
    shifted = "shift_labels" in inspect.signature(ForCausalLMLoss).parameters if shift_labels is None else shift_labels
    labels = _rows(micro_batch.masked_labels())
    return {
        "input_ids": _rows(micro_batch.tokens),
        "position_ids": _rows(micro_batch.position_ids),
        **({"labels": labels, "shift_labels": labels} if shifted else {"labels": _rolled(labels)}),
        **_offsets(micro_batch),
        "use_cache": False,
    }


def _rows(array: Any) -> torch.Tensor:
    """Return an array of [T] or [MBS, T] as a tensor of [MBS, T]."""
    tensor = torch.as_tensor(array)
    return tensor.reshape(-1, tensor.shape[-1])


def _offsets(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return the offsets that flash kernels read; dense rows have none."""
    if micro_batch.cu_seqlens_padded is None:
        return {}
    offsets, longest = torch.as_tensor(micro_batch.cu_seqlens_padded), micro_batch.max_seqlen
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def _rolled(labels: torch.Tensor) -> torch.Tensor:
    """Move labels [MBS, T] one slot on, for a loss that moves them back."""
    if bool((labels[:, -1] != IGNORE_INDEX).any()):
        raise ContractError(
            "a row's last slot has a target, which a loss that shifts labels itself cannot reach; set "
            "packing.tail_slots to 1 on the server, or install a transformers whose ForCausalLMLoss takes shift_labels"
        )
    return torch.roll(labels, 1, dims=1)


def attach(trainer: Any, feed: Feed) -> None:
    """Train ``trainer`` on ``feed``: nothing is prepared, sharded, skipped or fetched ahead by accelerate.

    Checkpoints hold the state of the feed before the first step not trained, in ``trainer_state.json``;
    ``trainer.train(resume_from_checkpoint=…)`` loads it into a new feed.

    Only training is attached. ``Trainer.evaluate`` averages over batches; evaluate in a callback or behind
    ``train`` instead, with one pass over ``feed.stream("validation")``: sum the losses of ``arguments(mb)`` over
    ``mb``, skip fillers, divide by the sum of ``num_loss_tokens``. The checkpoint holds that stream's place too.

    Raises ``ConfigError`` that lists every argument that has to change. A feed whose steps have another
    number of micro-batches than ``gradient_accumulation_steps`` is a ``ContractError`` in ``train``,
    before anything is trained.
    """
    broken = [rule for holds, rule in _rules(trainer, feed) if not holds]
    if broken:
        raise ConfigError("this Trainer cannot train on a Feed:\n" + "\n".join(f"  {rule}" for rule in broken))
    batches = _Batches(feed, trainer.args.gradient_accumulation_steps)
    trainer.get_train_dataloader = lambda: batches
    trainer.add_callback(PackhorseFeed(trainer, feed))


def _rules(trainer: Any, feed: Feed) -> Iterator[tuple[bool, str]]:
    """Yield each demand on the trainer: (whether it holds, what to change)."""
    args = trainer.args
    yield args.max_steps > 0, f"max_steps={args.max_steps} must be the number of steps: a stream has no length"
    yield args.ignore_data_skip, "ignore_data_skip must be True: the feed resumes by itself, nothing is to be skipped"
    yield not args.auto_find_batch_size, "auto_find_batch_size must be False: the contract fixes the batch size"
    yield args.n_gpu <= 1, f"n_gpu={args.n_gpu} must be 1 a process: launch with torchrun, not DataParallel"
    yield (
        args.world_size == 1 or args.average_tokens_across_devices,
        "average_tokens_across_devices must be True: the loss is divided by the tokens of all ranks",
    )
    yield (
        trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None,
        "the model's forward must take num_items_in_batch (or pass compute_loss_func): its own mean weighs "
        "micro-batches, not tokens",
    )
    yield args.label_smoothing_factor == 0, "label_smoothing_factor must be 0: it shifts labels that are shifted"
    yield (
        not args.restore_callback_states_from_checkpoint,
        "restore_callback_states_from_checkpoint must be False: it makes callbacks anew, without their feed",
    )
    yield (
        feed.layout == ParallelLayout(data=args.world_size),
        f"the feed's layout {feed.layout} must be data={args.world_size}, one reader a process",
    )


class _Batches:
    """Iterable in place of a ``DataLoader`` of ``Trainer``; iterating again goes on, never back."""

    def __init__(self, feed: Feed, accumulation: int) -> None:
        self._feed = feed
        self._accumulation = accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for micro_batch in self._feed:
            if micro_batch.num_microbatches != self._accumulation:
                raise ContractError(
                    f"gradient_accumulation_steps={self._accumulation} must be {micro_batch.num_microbatches}: "
                    "global_batch_size / (micro_batch_size x data-parallel size)"
                )
            yield arguments(micro_batch)


class PackhorseFeed(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is untyped here
    """Callback that keeps the feed's state in the trainer's checkpoints, under this class's name."""

    def __init__(self, trainer: Any, feed: Feed) -> None:
        self._trainer = trainer
        self._feed = feed
        self._trained_before = 0  # steps of the feed before the trainer's step 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load the state of the checkpoint that training goes on from, if any."""
        if state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__)
            if saved is None:
                raise ContractError("the checkpoint holds no state of a feed: it was saved without attach()")
            self._feed.load_state_dict(saved["attributes"]["feed"])
        step, index = self._feed.position
        if index:
            raise ContractError(f"the feed stands inside a step, at {(step, index)}; Trainer begins at a boundary")
        self._trained_before = step - state.global_step

    def state(self) -> dict[str, Any]:
        """Return the feed's state behind the last trained step, whatever was taken since."""
        trained = self._trained_before + self._trainer.state.global_step
        return {"args": {}, "attributes": {"feed": self._feed.state_dict(step=trained)}}
