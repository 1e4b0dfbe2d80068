"""A Feed as the data of a Hugging Face ``Trainer``, and its state in the trainer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback

from packhorse.contract.batch_contract import BatchContract, Packing
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError, ContractError
from packhorse.feed import Feed, declared_contract
from packhorse.hf.inputs import arguments
from packhorse.hf.model_check import check

__all__ = ["attach"]


def attach(trainer: Any, feed: Feed) -> None:
    """Train ``trainer`` on ``feed``: nothing is prepared, sharded, skipped or fetched ahead by accelerate.

    Checkpoints hold the state of the feed before the first step not trained, in ``trainer_state.json``;
    ``trainer.train(resume_from_checkpoint=…)`` loads it into a new feed.

    Only training is attached. ``Trainer.evaluate`` averages over batches; evaluate in a callback or behind
    ``train`` instead, with one pass over ``feed.stream("validation")``: sum the losses of ``arguments(mb)`` over
    ``mb``, skip fillers, divide by the sum of ``num_loss_tokens``. The checkpoint holds that stream's place too.

    A step without a trained token has the loss 0 and no gradient: ``compute_loss`` is told of one item at least, where
    ``Trainer`` divides by 0. Its loss is NaN then, and with a loss of one's own all weights may be.

    The model is checked, as ``check`` does, unless the feed's contract declares rows that are not packed.

    Raises ``ConfigError`` that lists every argument that has to change, and a model that trains across samples.
    A feed whose steps have another number of micro-batches than ``gradient_accumulation_steps`` is a
    ``ContractError`` in ``train``, before anything is trained.
    """
    broken = [rule for holds, rule in _rules(trainer, feed) if not holds]
    broken += _broken_by_model(trainer.model, declared_contract(feed))
    if broken:
        raise ConfigError("this Trainer cannot train on a Feed:\n" + "\n".join(f"  {rule}" for rule in broken))
    batches = _Batches(feed, trainer.args.gradient_accumulation_steps, trainer.model)
    trainer.get_train_dataloader = lambda: batches
    trainer.compute_loss = _of_some_items(trainer.compute_loss)
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


def _broken_by_model(model: Any, declared: BatchContract) -> list[str]:
    """Check the model, unless its rows are declared to hold one sample or one run of ids each."""
    runs_on = declared.packing is Packing.CONCAT and declared.isolate_documents is False
    if declared.packing is Packing.NONE or runs_on:
        return []
    try:
        check(model)
    except ConfigError as refusal:
        return [str(refusal)]
    return []


def _of_some_items(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Trainer.compute_loss`` that is never told to divide by 0 items: their sum is 0 then."""

    def compute(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        items = num_items_in_batch
        if items is not None:
            items = max(items, 1) if isinstance(items, int) else items.clamp(min=1)
        return compute_loss(*args, num_items_in_batch=items, **kwargs)

    return compute


class _Batches:
    """Iterable in place of a ``DataLoader`` of ``Trainer``; iterating again goes on, never back."""

    def __init__(self, feed: Feed, accumulation: int, model: Any) -> None:
        self._feed = feed
        self._model = model
        self._accumulation = accumulation

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for micro_batch in self._feed:
            if micro_batch.num_microbatches != self._accumulation:
                raise ContractError(
                    f"gradient_accumulation_steps={self._accumulation} must be {micro_batch.num_microbatches}: "
                    "global_batch_size / (micro_batch_size x data-parallel size)"
                )
            yield arguments(micro_batch, model=self._model)


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
