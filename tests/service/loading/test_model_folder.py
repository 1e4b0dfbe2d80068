"""A model's folder gives tokenizer, special tokens and template together, to serve and prepare alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from packhorse.errors import ConfigError
from packhorse_service.loading.model_folder import ModelFolder


@pytest.fixture
def folder(tiny_tokenizer: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_tokenizer, tmp_path / "tokenizer.json")
    return tmp_path


def test_a_folder_gives_all_that_lies_in_it(folder: Path) -> None:
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": "of the settings"}
    assert (ModelFolder(folder).tokens, ModelFolder(folder).chat_template) == ({}, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = ModelFolder(folder)
    assert (model.file, model.tokens) == (folder / "tokenizer.json", {"eos_token": "<|im_end|>"})
    assert model.chat_template == "of the settings"
    (folder / "chat_template.jinja").write_text("of its own")
    assert ModelFolder(folder).chat_template == "of its own"


def test_of_several_templates_the_default_is_taken_or_none(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert ModelFolder(folder).chat_template == "d"
    path.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(ConfigError, match="named tool_use, and none is 'default'"):
        ModelFolder(folder)
    path.write_text('{"eos_token": "a", "eos_token": "b"}')
    with pytest.raises(ConfigError, match="'eos_token' twice"):
        ModelFolder(folder)


def test_a_file_is_a_tokenizer_alone(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("beside it")
    model = ModelFolder(folder / "tokenizer.json")
    assert (model.file, model.tokens, model.chat_template) == (folder / "tokenizer.json", {}, None)
