"""``packhorse prepare``, as typer sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    tokenizer: Annotated[Path | None, typer.Option(help="Write ids, not text: a tokenizer.json.")] = None,
    eos_token: Annotated[str | None, typer.Option(help="With --tokenizer: appended to each text document.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace shards of that name.")] = False,
) -> int:
    """Turn JSONL (text, prompt/completion, messages and more) into WebDataset shards."""
    summary = prepare(
        inputs,
        out,
        name=name,
        source_format=source_format,
        field=field,
        ignore_fields=ignore_field or (),
        max_shard_bytes=shard_bytes,
        max_shard_samples=shard_samples,
        tokenizer=None if tokenizer is None else TokenizerSpec(file=str(tokenizer), eos_token=eos_token),
        overwrite=overwrite,
    )
    typer.echo(f"{summary.samples} samples of {summary.rows} rows in {len(summary.shards)} shards")
    typer.echo(f"serve them with  shards: {summary.pattern}")
    return 0
