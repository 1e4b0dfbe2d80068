"""``packhorse loadtest``, as typer sees it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from packhorse_service.loadtest.load_test import run_load_test
from packhorse_service.loadtest.report.outcome import as_json
from packhorse_service.loadtest.report.outcome_page import write_page
from packhorse_service.loadtest.report.outcome_table import show
from packhorse_service.loadtest.scenario.scenario import MOST_RANKS, Transport, load_scenario

__all__ = ["loadtest_command"]

RANKS, DATA, PACE, OUT = "Ranks", "Server and data", "How ranks behave", "Results"


def _option(panel: str, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **settings)


# Left out, an option is None: what a scenario says is kept, and so are the defaults of Scenario.
Feed = Annotated[
    Path | None,
    typer.Argument(help="Serve this configuration; left out: synthetic data.", metavar="FEED.YAML", show_default=False),
]
ScenarioFile = Annotated[
    Path | None,
    typer.Option("--scenario", help="Take what options leave out from this file.", metavar="FILE.YAML"),
]
Endpoint = Annotated[
    str | None, _option(DATA, "Of a server that runs already; FEED.YAML then only says what ranks declare.")
]
TransportName = Annotated[Transport | None, _option(DATA, "Between ranks and a server of our own. Else tcp.")]
Curve = Annotated[bool | None, _option(DATA, "Encrypt, with keys made for a server of our own.", "--curve")]
KeyFile = Annotated[Path | None, _option(DATA, "Key of the ranks, for a feed or server that has keys.", metavar="FILE")]
SeqLength = Annotated[int | None, _option(DATA, "Synthetic data: slots of a pack. Else 8192.", min=8)]
MeanLength = Annotated[int | None, _option(DATA, "Synthetic data: slots of a sample, in the mean. Else 500.", min=2)]
Vocabulary = Annotated[int | None, _option(DATA, "Synthetic data: ids there are. Else 32000.", min=2)]
MicroBatches = Annotated[int | None, _option(DATA, "Synthetic data: of a rank in a step. Else 4.", min=1)]
Ranks = Annotated[int | None, _option(RANKS, "Data-parallel ranks. Else 8.", min=1, max=MOST_RANKS)]
Layout = Annotated[str | None, _option(RANKS, "Sizes of the job, for example data=64,tensor=4.")]
Processes = Annotated[int | None, _option(RANKS, "Processes they are spread over. Else one a core.", min=1)]
ConsumeMs = Annotated[float | None, _option(PACE, "Think time per micro-batch, milliseconds. Else 20.", min=0)]
Jitter = Annotated[float | None, _option(PACE, "Share of it that one may vary by. Else 0.2.", min=0, max=1)]
SlowRanks = Annotated[str | None, _option(PACE, "Ranks that take longer: how many, or a share as in 10%.")]
SlowFactor = Annotated[float | None, _option(PACE, "Times the think time of the others. Else 2.", min=1)]
StoppedRanks = Annotated[
    int | None, _option(PACE, "Ranks that take nothing for a quarter of the time, from half-way on.", min=0)
]
Verify = Annotated[
    bool | None, _option(PACE, "Compute the digest of whole rows again. Else yes.", "--verify/--no-verify")
]
Seconds = Annotated[float | None, _option(OUT, "How long to measure, behind the start. Else 30.", min=0.1)]
Require = Annotated[
    list[str] | None,
    _option(OUT, "What must hold, as in 'wait_p99_ms<20', repeatable; else exit 1. docs/loadtest.md has the metrics."),
]
Json = Annotated[Path | None, _option(OUT, "Write the result to this file; - prints it.", "--json", metavar="FILE")]
Html = Annotated[Path | None, _option(OUT, "Write a page with plots to this file.", metavar="FILE.HTML")]


def loadtest_command(
    feed: Feed = None,
    scenario: ScenarioFile = None,
    endpoint: Endpoint = None,
    transport: TransportName = None,
    curve: Curve = None,
    key_file: KeyFile = None,
    seq_length: SeqLength = None,
    mean_length: MeanLength = None,
    vocab_size: Vocabulary = None,
    micro_batches: MicroBatches = None,
    ranks: Ranks = None,
    layout: Layout = None,
    processes: Processes = None,
    consume_ms: ConsumeMs = None,
    jitter: Jitter = None,
    slow_ranks: SlowRanks = None,
    slow_factor: SlowFactor = None,
    stopped_ranks: StoppedRanks = None,
    verify: Verify = None,
    seconds: Seconds = None,
    require: Require = None,
    json_: Json = None,
    html: Html = None,
) -> int:
    """Run many simulated ranks against a server, and tell what they saw: throughput, waits, memory, fairness.

    Each rank is a real client. It connects, takes a micro-batch, rebuilds and checks it, thinks, takes the next.
    """
    served = _given(feed=feed, endpoint=endpoint, transport=transport, curve=curve, key_file=key_file)
    synthetic = _given(
        seq_length=seq_length, mean_length=mean_length, vocab_size=vocab_size, micro_batches=micro_batches
    )
    who = _given(ranks=ranks, layout=layout, processes=processes, slow_ranks=slow_ranks, stopped_ranks=stopped_ranks)
    pace = _given(consume_ms=consume_ms, jitter=jitter, slow_factor=slow_factor, verify=verify, seconds=seconds)
    more = _given(synthetic=synthetic or None, require=require or None)
    asked = load_scenario(scenario, {**served, **who, **pace, **more})
    to_stdout = json_ == Path("-")
    console = Console(stderr=to_stdout)
    outcome = run_load_test(asked, shlex.join(["packhorse", *sys.argv[1:]]), console)
    show(outcome, console)
    if html is not None:
        write_page(outcome, html)
    if to_stdout:
        typer.echo(as_json(outcome))
    elif json_ is not None:
        json_.write_text(as_json(outcome) + "\n", encoding="utf-8")
    return 0 if outcome.ok else 1


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that were not left out."""
    return {name: value for name, value in options.items() if value is not None}
