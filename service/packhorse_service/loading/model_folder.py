"""A model's folder as models ship them: ``tokenizer.json``, and beside it the special tokens and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packhorse.errors import ConfigError
from packhorse_service.text.strict_json import read_json

__all__ = ["ModelFolder"]


class ModelFolder:
    """Tokenizer of a model: the file, and what lies beside it where ``path`` is a folder.

    ``tokens`` has the texts of ``eos_token`` and ``bos_token`` that ``tokenizer_config.json`` names;
    ``chat_template`` is that of ``chat_template.jinja``, else of ``tokenizer_config.json``, else ``None``. Raises
    ``ConfigError`` for files that cannot be read, and for several templates of which none is the default.
    """

    def __init__(self, path: Path) -> None:
        self.file, self.chat_template = path, None
        self.tokens: dict[str, str] = {}
        if not path.is_dir():
            return
        self.file = path / "tokenizer.json"
        config = _settings(path / "tokenizer_config.json")
        for name in ("eos_token", "bos_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                self.tokens[name] = token
        template = path / "chat_template.jinja"
        self.chat_template = _read(template) if template.exists() else _only(config.get("chat_template"), path)


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = read_json(_read(path))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {str(path)!r}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"tokenizer: {str(path)!r} must hold an object")
    return settings


def _only(template: object, path: Path) -> str | None:
    """Return the template of a configuration, which may have several by name."""
    if template is None or isinstance(template, str):
        return template
    named = {entry.get("name"): entry.get("template") for entry in template} if isinstance(template, list) else {}
    found = named.get("default")
    if not isinstance(found, str):
        raise ConfigError(
            f"tokenizer: {str(path)!r} has chat templates named {', '.join(map(str, named))}, and none is 'default'; "
            "set chat_template of the source to the one to use"
        )
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tokenizer: {str(path)!r} cannot be read: {error}") from error
