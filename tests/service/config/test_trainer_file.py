"""A trainer's file is checked as the server's is: all that is wrong, by field and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.contract.batch_contract import BatchContract, LossReduction
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.errors import ConfigError
from packhorse_service.config.trainer_file import TrainerFile, load_trainer


def load(folder: Path, text: str) -> TrainerFile:
    path = folder / "trainer.yaml"
    path.write_text(text, encoding="utf-8")
    return load_trainer(path)


def test_what_is_left_out_is_not_declared(tmp_path: Path) -> None:
    assert load(tmp_path, "{}") == TrainerFile()
    assert load(tmp_path, "window: 16").layout is None


def test_every_section_becomes_the_value_that_a_trainer_would_declare(tmp_path: Path) -> None:
    text = (
        "layout: {data: 8, context: 2}\n"
        "contract: {seq_length: 8192, loss_reduction: per_token}\n"
        "trainer: {stack: megatron_lm, transformer_impl: transformer_engine}\n"
        "window: 16\n"
    )
    assert load(tmp_path, text) == TrainerFile(
        layout=ParallelLayout(data=8, context=2),
        contract=BatchContract(seq_length=8192, loss_reduction=LossReduction.PER_TOKEN),
        trainer=TrainerFacts(stack=Stack.MEGATRON_LM, transformer_impl="transformer_engine"),
        window=16,
    )


def test_all_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    text = "layuot: {}\nlayout: {data: 0}\ncontract: {seq_lenght: 1}\ntrainer: {stack: megatron}\nwindow: wide"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    head, *lines = str(error.value).splitlines()
    assert head == f"{tmp_path / 'trainer.yaml'}:"
    expected = {
        "layuot: unknown field; did you mean 'layout'?",
        "contract.seq_lenght: unknown field; did you mean 'seq_length'?",
    }
    assert expected <= {line.strip() for line in lines}
    for field in ("layout.data=0", "trainer.stack='megatron'", "window='wide'"):
        assert sum(line.strip().startswith(field) for line in lines) == 1, field
    assert len(lines) == 5


def test_facts_have_a_section_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contract\.trainer: unknown field"):
        load(tmp_path, "contract: {trainer: {world_size: 8}}")


@pytest.mark.parametrize("text", ["", "[a, b]", "just text"])
def test_a_file_without_sections_is_told_which_there_are(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="must be a mapping of layout, contract, trainer, window"):
        load(tmp_path, text)
