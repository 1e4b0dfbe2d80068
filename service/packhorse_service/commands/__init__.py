"""The commands, as typer sees them. Each parses its arguments and calls one function."""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from packhorse import __version__
from packhorse.errors import ConfigError
from packhorse_service.admission import ACCEPTED_AHEAD, Limits
from packhorse_service.checking import as_json, check_access, check_streams, explain_rule, load_lengths, show
from packhorse_service.commands.keys import keygen_command
from packhorse_service.commands.loadtest import loadtest
from packhorse_service.commands.planning import inspect, plan
from packhorse_service.commands.reporting import missing_extra, reporting
from packhorse_service.commands.status import status_command
from packhorse_service.commands.tapping import tap_command
from packhorse_service.config import ServeConfig, load_config
from packhorse_service.keys import load_curve
from packhorse_service.listening import is_private, require_private
from packhorse_service.memory_bound import MemoryBound, refuse_over_limit, server_memory, stream_memory
from packhorse_service.offer import readers_of
from packhorse_service.open_files import allow_open_files
from packhorse_service.pipeline import StreamPlan, make_engine
from packhorse_service.prepare import MAX_SHARD_BYTES, MAX_SHARD_SAMPLES, prepare
from packhorse_service.server import Server
from packhorse_service.sources.formats import SampleFormat
from packhorse_service.streams import plan_streams
from packhorse_service.tokenising import TokenizerSpec
from packhorse_service.trainer_file import load_trainer

__all__ = ["app"]

app = typer.Typer(
    help="Feed packed sequences to LLM trainers: pack on the fly, prove the contract, push micro-batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
log = logging.getLogger("packhorse")


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


@app.command()
@reporting
def serve(
    config: Annotated[Path, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML")],
    listen: Annotated[str | None, typer.Option(help="Listen here instead of where the file says.")] = None,
    endpoint_file: Annotated[
        Path | None, typer.Option(help="Write the endpoint to this file once the server listens.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on a network without keys: whoever reaches it can read the data.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> int:
    """Launch the packing server beside the trainers.

    It reads and packs at once, waits for every reader of the layout, and ends when all have left. Elsewhere than
    on loopback or ipc it needs keys: curve: {key_file: keys/server.key, clients: keys/clients.toml} in the file, made
    by packhorse keygen.
    """
    _log_to_stderr(log_level)
    described = load_config(config)
    where = listen or described.listen
    require_private(where, curve=described.curve is not None, insecure=insecure)
    if insecure and described.curve is None and not is_private(where):
        log.warning("without keys on %s (--insecure): whoever reaches it can read the data and pose as a rank", where)
    curve = None if described.curve is None else load_curve(described.curve, config.parent)
    plans = plan_streams(described, config.parent)
    refuse_over_limit(described, server_memory(_memory_of(stream, described, config.parent) for stream in plans))
    for warning in dict.fromkeys(warning for stream in plans for warning in stream.warnings):
        log.warning("%s", warning)
    readers = [len(readers_of(stream.layout, stream.contract.readers)) for stream in plans]
    allow_open_files(Limits.for_readers(sum(readers)).connections, ahead=ACCEPTED_AHEAD)
    with ExitStack() as engines:
        streams = [(stream, make_engine(described, stream)) for stream in plans]
        for _, engine in streams:
            engines.callback(engine.close)
        server = Server(
            streams,
            where,
            steps_ahead=described.steps_ahead,
            rejoin_after_s=described.rejoin_after_s,
            curve=curve,
            insecure=insecure,
        )
        if endpoint_file is not None:
            server.publish_endpoint(endpoint_file)
        for stream, count in zip(plans, readers, strict=True):
            log.info("listening on %s for %d readers of %s, %s", server.endpoint, count, stream.name, stream.layout)
        gc.freeze()  # what start-up made stays: no collection need look at it, nor the end take it apart
        with server.stopped_by_signals():
            return 0 if server.serve() else 1


def _memory_of(stream: StreamPlan, described: ServeConfig, base: Path) -> MemoryBound:
    sizes = {source.plan.name: [shard.size for shard in source.shards] for source in stream.sources}
    return stream_memory(described.of_stream(stream.name), base, stream.contract, stream.layout, sizes)


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


def _log_to_stderr(level: str) -> None:
    form = "%(asctime)s %(levelname)-7s %(name)s  %(message)s"
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format=form, datefmt="%H:%M:%S")
