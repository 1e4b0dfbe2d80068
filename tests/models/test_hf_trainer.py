"""A Hugging Face Trainer on two gloo ranks, fed through ``attach``: every target once, also after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from packhorse import ConfigError, ContractError, Feed, ParallelLayout
from packhorse.hf import attach
from tests.harness import DEADLINE_S, running_server, write_config
from tests.models.comparing import TOLERANCE
from tests.models.conftest import Corpus
from tests.models.trainer_rank import LEARNING_RATE, SAVE_STEPS, STOP_AFTER, make_model
from tests.service.shards_on_disk import ids_member, write_tar

Calls = list[dict[str, Any]]

GOOD = {"max_steps": 2, "ignore_data_skip": True, "gradient_accumulation_steps": 6}


def trainer_of(folder: Path, **settings: Any) -> Any:
    """A Trainer with these settings."""
    return trainer_with({}, folder, **settings)


def trainer_with(given: Mapping[str, Any], folder: Path, **settings: Any) -> Any:
    """A Trainer that is ``given`` more than a model and these settings."""
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **settings
    )
    return Trainer(make_model(), arguments, **given)


def train(corpus: Corpus, folder: Path, phase: str) -> list[Calls]:
    """Both ranks of one job against a server of its own; what each rank's model was called with."""
    with running_server(corpus.config(data=2)) as server:
        command = [sys.executable, "-m", "tests.models.trainer_rank", server.endpoint, str(folder), phase]
        ranks = [subprocess.Popen(command, cwd=Path(__file__).parents[2], env=variables(rank)) for rank in range(2)]
        try:
            assert [process.wait(DEADLINE_S) for process in ranks] == [0, 0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return [torch.load(folder / f"calls-{phase}-{rank}.pt", weights_only=True) for rank in range(2)]


def variables(rank: int) -> dict[str, str]:
    """What torchrun sets; the ranks meet in a file, so address and port are only looked at for their presence."""
    placed = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return {**os.environ, **placed, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def job(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that stops one step behind its checkpoint, and the one that goes on from there."""
    folder = tmp_path_factory.mktemp("job")
    return SimpleNamespace(folder=folder, first=train(corpus, folder, "fresh"), resumed=train(corpus, folder, "resume"))


def targets(calls: Iterable[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """(input, target) pairs that the model was trained on."""
    pairs: Counter[tuple[int, int]] = Counter()
    for call in calls:
        trained = call["shift_labels"] != -100
        pairs.update(zip(call["input_ids"][trained].tolist(), call["shift_labels"][trained].tolist(), strict=True))
    return pairs


def test_every_target_is_trained_on_once_over_both_runs(corpus: Corpus, job: SimpleNamespace) -> None:
    assert {call["step"] for calls in job.first for call in calls} == set(range(STOP_AFTER))
    assert min(call["step"] for calls in job.resumed for call in calls) == SAVE_STEPS
    kept = [call for calls in job.first for call in calls if call["step"] < SAVE_STEPS]
    kept += [call for calls in job.resumed for call in calls]
    on_disk: Counter[tuple[int, int]] = Counter()
    for sample in corpus.samples:
        trained = sample.mask == 1
        on_disk.update(zip(sample.tokens[trained].tolist(), sample.labels[trained].tolist(), strict=True))
    assert targets(kept) == on_disk


def test_the_resumed_run_begins_with_what_was_trained_behind_the_checkpoint(job: SimpleNamespace) -> None:
    for first, resumed in zip(job.first, job.resumed, strict=True):
        behind = [call["input_ids"] for call in first if call["step"] == SAVE_STEPS]
        again = [call["input_ids"] for call in resumed if call["step"] == SAVE_STEPS]
        assert torch.equal(torch.cat(behind), torch.cat(again))


def test_the_loss_is_divided_by_the_targets_of_the_step_over_all_ranks(job: SimpleNamespace) -> None:
    for run in (job.first, job.resumed):
        calls = [call for rank in run for call in rank]
        for step in {call["step"] for call in calls}:
            of_step = [call for call in calls if call["step"] == step]
            assert {call["items"] for call in of_step} == {float(targets(of_step).total())}


def test_two_ranks_train_as_one_loop_over_all_rows_does(job: SimpleNamespace) -> None:
    """Plain SGD on the recorded calls gives the weights of the checkpoint: no rank's share is averaged away."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in range(SAVE_STEPS):
        optimizer.zero_grad()
        for call in (call for rank in job.first for call in rank if call["step"] == step):
            labels = call["shift_labels"]
            inputs = {name: call[name] for name in ("input_ids", "position_ids", "shift_labels")}
            model(**inputs, labels=labels, use_cache=False, num_items_in_batch=call["items"]).loss.backward()
        optimizer.step()
    saved = load_file(job.folder / "job" / f"checkpoint-{SAVE_STEPS}" / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in saved:
            torch.testing.assert_close(value, saved[name], atol=TOLERANCE, rtol=0)


def test_the_checkpoint_holds_the_boundary_behind_the_last_trained_step(job: SimpleNamespace) -> None:
    text = (job.folder / "job" / f"checkpoint-{SAVE_STEPS}" / "trainer_state.json").read_text()
    state = json.loads(text)["stateful_callbacks"]["PackhorseFeed"]["attributes"]["feed"]
    assert state["position"] == [SAVE_STEPS, 0]


# Steps with nothing to train on --------------------------------------------------------------------------


def untrained_corpus(folder: Path, untrained: set[int]) -> Path:
    """A configuration of one row a micro-batch and two a step, whose ``untrained`` steps are masked throughout."""
    files: list[tuple[str, bytes]] = []
    for row in range(8):
        mask = [0, *[int(row // 2 not in untrained)] * 16]
        ids = [1 + (5 * row + 7 * i) % 96 for i in range(17)]
        files += [(f"{row}.npy", ids_member(ids)), (f"{row}.loss_mask.npy", ids_member(mask))]
    write_tar(folder / "a-0.tar", files)
    contract = {"seq_length": 16, "global_batch_size": 2, "vocab_size": 97}
    sources = {"a": {"shards": "a-0.tar", "shuffle": False}}
    return write_config(folder, contract=contract, loading={"workers": 0}, sources=sources)


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss as people write it with a mask: divided by 0, its gradients are NaN; those of torch's are not."""
    likely = outputs.logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(likely * (labels != -100)).sum() / num_items_in_batch


@pytest.mark.parametrize("loss", [{}, {"compute_loss_func": own_loss}], ids=["the model's", "own"])
@pytest.mark.parametrize("untrained", [{0}, {1, 2}, {3}, {0, 1, 2, 3}], ids=str)
def test_a_step_with_nothing_to_train_on_leaves_the_weights_as_they_are(
    tmp_path: Path, untrained: set[int], loss: dict[str, Any]
) -> None:
    settings = {**GOOD, "max_steps": 4, "gradient_accumulation_steps": 2, "optim": "sgd", "logging_steps": 1}
    trainer = trainer_with(loss, tmp_path / "job", logging_nan_inf_filter=False, **settings)
    weights = [[parameter.detach().clone() for parameter in trainer.model.parameters()]]

    class Keep(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])

    trainer.add_callback(Keep())
    with running_server(untrained_corpus(tmp_path, untrained)) as server, Feed(server.endpoint) as feed:
        attach(trainer, feed)
        trainer.train()
    assert len(weights) == 5
    assert all(bool(parameter.isfinite().all()) for after in weights for parameter in after)
    same = [all(map(torch.equal, before, after)) for before, after in pairwise(weights)]
    assert same == [step in untrained for step in range(4)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [loss == 0 for loss in losses] == same


# Trainers that never get to the feed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_steps": -1}, "max_steps=-1 must be"),
        ({"ignore_data_skip": False}, "ignore_data_skip must be True"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size must be False"),
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states_from_checkpoint"),
        ({"max_steps": -1, "ignore_data_skip": False}, "(?s)max_steps.*ignore_data_skip"),
    ],
    ids=str,
)
def test_a_trainer_that_would_train_wrong_is_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    with Feed("tcp://127.0.0.1:9") as feed, pytest.raises(ConfigError, match=named):
        attach(trainer_of(tmp_path, **{**GOOD, **changed}), feed)


def test_a_feed_of_another_layout_is_refused(tmp_path: Path) -> None:
    feed = Feed("tcp://127.0.0.1:9", layout=ParallelLayout(data=2), rank=0)
    with feed, pytest.raises(ConfigError, match=r"layout DP2.* must be data=1"):
        attach(trainer_of(tmp_path, **GOOD), feed)


def test_another_accumulation_is_refused_before_anything_is_trained(corpus: Corpus, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **{**GOOD, "gradient_accumulation_steps": 4})
    with running_server(corpus.config()) as server, Feed(server.endpoint, start_timeout=DEADLINE_S) as feed:
        attach(trainer, feed)
        with pytest.raises(ContractError, match="gradient_accumulation_steps=4 must be 6"):
            trainer.train()
    assert trainer.state.global_step == 0


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **GOOD)
    with Feed("tcp://127.0.0.1:9") as feed:
        attach(trainer, feed)
        (callback,) = (c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PackhorseFeed")
        with pytest.raises(ContractError, match="holds no state of a feed"):
            callback.on_train_begin(
                trainer.args, SimpleNamespace(global_step=3, stateful_callbacks={}), trainer.control
            )
