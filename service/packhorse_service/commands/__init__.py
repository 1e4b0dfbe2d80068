"""The commands, as typer sees them. Each parses its arguments and calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from packhorse import __version__
from packhorse.errors import ConfigError
from packhorse_service.check.checks import as_json, check_access, check_streams, explain_rule, load_lengths, show
from packhorse_service.commands.exit_codes import missing_extra, reporting
from packhorse_service.commands.keygen_command import keygen_command
from packhorse_service.commands.loadtest_command import loadtest
from packhorse_service.commands.plan_command import inspect, plan
from packhorse_service.commands.serve_command import serve
from packhorse_service.commands.status_command import status_command
from packhorse_service.commands.tap_command import tap_command
from packhorse_service.config.serve_config import load_config
from packhorse_service.config.trainer_file import load_trainer
from packhorse_service.loading.tokenizer import TokenizerSpec
from packhorse_service.prepare.prepare import MAX_SHARD_BYTES, MAX_SHARD_SAMPLES, prepare
from packhorse_service.sources.formats import SampleFormat

__all__ = ["app"]

app = typer.Typer(
    help="Feed packed sequences to LLM trainers: pack on the fly, prove the contract, push micro-batches.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs are wrapped to the terminal, not where the source breaks them
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""


app.command()(reporting(serve))


@app.command()
@reporting
def check(
    config: Annotated[
        Path | None, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML", show_default=False)
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option(help="What a trainer declares (YAML).", metavar="TRAINER.YAML")
    ] = None,
    world: Annotated[int | None, typer.Option(help="Ranks of the trainer's job.", min=1)] = None,
    lengths: Annotated[Path | None, typer.Option(help="Slots of each sample, to bound the fill (.npy).")] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The lengths count ids: n ids fill n - 1 slots.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="It will be served with --insecure: without keys, on a network.")
    ] = False,
    rule: Annotated[str | None, typer.Option("--explain", help="Explain this rule, and check nothing.")] = None,
) -> int:
    """Prove the contract without a server: the rules of the handshake, and what follows from the layout.

    Exit code 0 where it holds, with or without warnings, 1 where it does not.
    """
    if rule is not None:
        typer.echo(explain_rule(rule))
        return 0
    if config is None:
        raise ConfigError("FEED.YAML is missing; name the configuration, or a rule with --explain")
    described = load_config(config)
    check_access(described, config.parent, insecure=insecure)
    report = check_streams(
        described,
        config.parent,
        None if trainer is None else load_trainer(trainer),
        world,
        None if lengths is None else load_lengths(lengths, ids=ids),
    )
    if json_:
        typer.echo(as_json(report))
    else:
        show(report, Console())
    return 0 if report.ok else 1


app.command()(reporting(plan))
app.command()(reporting(inspect))
app.command("keygen")(reporting(keygen_command))
app.command("tap")(reporting(tap_command))
app.command("status")(reporting(status_command))
app.command()(reporting(loadtest))


@app.command("prepare")
@reporting
def prepare_command(
    inputs: Annotated[list[Path], typer.Argument(help="JSONL, JSON arrays, text files, or folders of them.")],
    out: Annotated[Path, typer.Argument(help="The folder for the shards.")],
    name: Annotated[str, typer.Option(help="Shards are called NAME-000000.tar and so on.")] = "data",
    source_format: Annotated[SampleFormat, typer.Option("--format", help="What the rows hold.")] = SampleFormat.AUTO,
    field: Annotated[str | None, typer.Option(help="The field to read; found by name if left out.")] = None,
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
        max_shard_bytes=shard_bytes,
        max_shard_samples=shard_samples,
        tokenizer=None if tokenizer is None else TokenizerSpec(file=str(tokenizer), eos_token=eos_token),
        overwrite=overwrite,
    )
    typer.echo(f"{summary.samples} samples of {summary.rows} rows in {len(summary.shards)} shards")
    typer.echo(f"serve them with  shards: {summary.pattern}")
    return 0


@app.command()
@reporting
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo leaves what it makes.")] = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.", min=1)] = None,
) -> int:
    """Pack this Python's own source, docs and a chat set from them; train four ranks; draw the packs."""
    try:
        from packhorse_service.demo import run_demo
    except ModuleNotFoundError as error:
        missing_extra("demo", error, "demo")
    return run_demo(out, steps)
