"""``packhorse prepare``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.errors import ConfigError
from packhorse_service.loading.model_folder import ModelFolder
from packhorse_service.loading.tokenizer import TokenizerSpec
from packhorse_service.prepare.prepare import MAX_SHARD_BYTES, MAX_SHARD_SAMPLES, prepare
from packhorse_service.sources.formats import SampleFormat

__all__ = ["prepare_command"]


def prepare_command(
    inputs: Annotated[list[Path], typer.Argument(help="JSONL, JSON arrays, text files, or folders of them.")],
    out: Annotated[Path, typer.Argument(help="The folder for the shards.")],
    name: Annotated[str, typer.Option(help="Shards are called NAME-000000.tar and so on.")] = "data",
    source_format: Annotated[SampleFormat, typer.Option("--format", help="What the rows hold.")] = SampleFormat.AUTO,
    field: Annotated[str | None, typer.Option(help="The field to read; found by name if left out.")] = None,
    ignore_field: Annotated[
        list[str] | None, typer.Option(help="A field to leave out though it says something; may be repeated.")
    ] = None,
    shard_bytes: Annotated[int, typer.Option(help="Close a shard at this many bytes.", min=1)] = MAX_SHARD_BYTES,
    shard_samples: Annotated[int, typer.Option(help="… or at this many samples.", min=1)] = MAX_SHARD_SAMPLES,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Write ids, not text: a tokenizer.json or a model's folder.")
    ] = None,
    eos_token: Annotated[str | None, typer.Option(help="With --tokenizer: appended to each text document.")] = None,
    bos_token: Annotated[str | None, typer.Option(help="With --tokenizer: for templates that name it.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="With --tokenizer: a jinja file; left out: the folder's, else ChatML.")
    ] = None,
    date: Annotated[str | None, typer.Option(help="What chat templates get for today, as YYYY-MM-DD.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace shards of that name.")] = False,
) -> int:
    """Turn JSONL (text, prompt/completion, messages and more) into WebDataset shards."""
    if tokenizer is None and (eos_token, bos_token, chat_template, date) != (None,) * 4:
        raise ConfigError(
            "--eos-token, --bos-token, --chat-template and --date need --tokenizer: text is written as it is"
        )
    folder = None if tokenizer is None else ModelFolder(tokenizer)
    tokens = {name: text for name, text in (("eos_token", eos_token), ("bos_token", bos_token)) if text is not None}
    summary = prepare(
        inputs,
        out,
        name=name,
        source_format=source_format,
        field=field,
        ignore_fields=ignore_field or (),
        max_shard_bytes=shard_bytes,
        max_shard_samples=shard_samples,
        tokenizer=None if folder is None else _spec(folder, tokens),
        chat_template=_template(chat_template, folder),
        date=date,
        overwrite=overwrite,
    )
    typer.echo(f"{summary.samples} samples of {summary.rows} rows in {len(summary.shards)} shards")
    typer.echo(f"serve them with  shards: {summary.pattern}")
    return 0


def _spec(folder: ModelFolder, tokens: dict[str, str]) -> TokenizerSpec:
    named = folder.tokens | tokens
    return TokenizerSpec(file=str(folder.file), eos_token=named.get("eos_token"), bos_token=named.get("bos_token"))


def _template(path: Path | None, folder: ModelFolder | None) -> str | None:
    if path is None:
        return None if folder is None else folder.chat_template
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template={str(path)!r} cannot be read: {error}") from error
