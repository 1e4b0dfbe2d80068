"""The result of a load test for a person at a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from packhorse_service.loadtest.report.outcome import LoadTestOutcome
from packhorse_service.text.formatting import UNKNOWN, percent, rounded, si

__all__ = ["Row", "remarks", "rows_of", "show", "verdict_rows", "waited_rows"]

Row = tuple[str, str, str]  # what, how much, and a remark
NAMED = 5  # of those that were waited for
LATE_SHARE = 0.1  # of the think time; a load test that is later than this measures itself


def show(outcome: LoadTestOutcome, console: Console) -> None:
    """Show the outcome of a load test on the console."""
    setting = outcome.setting
    console.print(
        f"[bold]{setting.readers:,} ranks[/] ({escape(setting.layout)}) for {outcome.seconds:.1f} s, "
        f"{setting.consume_ms:g} ms per micro-batch ± {setting.jitter:.0%}; {escape(setting.data)}",
        highlight=False,
    )
    columns = (Column(style="bold", no_wrap=True), Column(no_wrap=True), Column(style="dim"))
    table = Table(*columns, show_header=False, box=None)
    for row in rows_of(outcome):
        table.add_row(*map(escape, row))
    console.print(table)
    _show_waited(outcome, console)
    for remark in remarks(outcome):
        console.print(f"[yellow]note:[/] {escape(remark)}", highlight=False)
    for kind, count in outcome.errors.items():
        console.print(f"[bold red]{count}x {kind}:[/] {escape(outcome.examples[kind])}", highlight=False)
    if outcome.verdicts:
        _show_verdicts(outcome, console)


def rows_of(outcome: LoadTestOutcome) -> Iterator[Row]:
    """Return the measured values as rows of label, value and remark."""
    yield from _throughput(outcome)
    yield from _waits(outcome)
    yield from _costs(outcome)


def _throughput(outcome: LoadTestOutcome) -> Iterator[Row]:
    m, totals = outcome.metrics, outcome.totals
    yield "tokens/s", si(m["tokens_per_s"]), f"{totals['tokens']:,} distinct tokens"
    fillers = f", {totals['fillers']:,} of them fillers" if totals["fillers"] else ""
    verified = f"; digests of {totals['verified']:,} checked" if outcome.setting.verify else "; digests not checked"
    yield (
        "micro-batches/s",
        si(m["micro_batches_per_s"]),
        f"{totals['micro_batches']:,} taken{fillers}{verified}",
    )
    yield "GB/s", rounded(m["gigabytes_per_s"]), f"{rounded(m['wire_bytes_per_token'])} bytes on the wire per token"
    yield "step", _ms(m["step_ms"]), "of all ranks, each with its micro-batches"
    yield "fairness", rounded(m["fairness"]), "fewest micro-batches of a rank ÷ mean, at equal demand"


def _waits(outcome: LoadTestOutcome) -> Iterator[Row]:
    m = outcome.metrics
    waits = " / ".join(rounded(m[f"wait_{name}_ms"]) for name in ("p50", "p95", "p99", "max"))
    yield "wait", f"{waits} ms", f"p50 / p95 / p99 / max; {percent(m['wait_share'])} of all ranks' time"
    if m["stopped_wait_max_ms"] is not None:
        names = ", ".join(map(str, outcome.setting.stopped_ranks))
        yield "wait for stopped", _ms(m["stopped_wait_max_ms"]), f"at most, while rank {names} took nothing"
    yield (
        "start",
        f"{rounded(m['handshakes_s'])} s",
        f"until all handshakes were done, first micro-batch at {rounded(m['first_micro_batch_s'])} s",
    )


def _costs(outcome: LoadTestOutcome) -> Iterator[Row]:
    m, bound = outcome.metrics, outcome.metrics["server_memory_of_bound"]
    known = m["server_memory_mib"] is not None
    yield (
        "server CPU",
        f"{rounded(m['server_cpu_s_per_mtok'])}{' s' if known else ''}",
        f"per million tokens; simulated ranks {rounded(m['client_cpu_s_per_mtok'])} s",
    )
    slope = "" if m["server_memory_slope"] is None else f", growing {m['server_memory_slope']:+.2f} MiB a minute"
    within = "" if bound is None else f"; {bound:.0%} of what check bounds it by"
    memory = f"{rounded(m['server_memory_mib'])} MiB" if known else UNKNOWN
    yield "server memory", memory, f"at most{slope}{within}" if known else "it is not ours"
    yield "ranks' memory", f"{rounded(m['client_memory_mib'])} MiB", f"of {outcome.setting.processes} processes"
    if known:
        yield "open files", rounded(m["server_open_files"]), f"of the server, for {outcome.setting.readers:,} ranks"


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else f"{rounded(value)} ms"


# Who was waited for, what was noticed, what was required ---------------------------------------------------


def waited_rows(outcome: LoadTestOutcome) -> list[tuple[str, str]]:
    """Return (what, or a rank and what it is in the test; rank-seconds) as the server said, most first."""
    rows = []
    for reason in dict.fromkeys(waited.reason for waited in outcome.waited_for):
        of_reason = [waited for waited in outcome.waited_for if waited.reason == reason]
        for waited in of_reason[: NAMED + 1]:
            what = f"  {waited.whom}{_role(waited.whom, outcome)}" if waited.whom else reason
            rows.append((what, f"{waited.seconds:,.0f}"))
    return rows


def _role(name: str, outcome: LoadTestOutcome) -> str:
    """Return the role that a rank was given: slow, stopped or none."""
    found = re.match(r"rank (\d+)", name)
    rank = int(found[1]) if found else None
    setting = outcome.setting
    return ", slow" if rank in setting.slow_ranks else ", stopped" if rank in setting.stopped_ranks else ""


def _show_waited(outcome: LoadTestOutcome, console: Console) -> None:
    if outcome.waited_for:
        columns = (Column("waited for, as the server said"), Column("rank-seconds", justify="right"))
        table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 1))
        for row in waited_rows(outcome):
            table.add_row(*map(escape, row))
        console.print(table)


def remarks(outcome: LoadTestOutcome) -> Iterator[str]:
    """Return the remarks that somebody who reads the values must know."""
    setting, late = outcome.setting, outcome.metrics["late_p99_ms"]
    if outcome.ended_early:
        yield f"measured for {outcome.seconds:.1f} s of {setting.seconds:g} s: {outcome.ended_early}"
    if late is not None and late > max(LATE_SHARE * setting.consume_ms, 1.0):
        yield (
            f"the load test itself was late by up to {rounded(late)} ms (p99): this machine cannot simulate more at "
            "this pace, and the figures are of both ends; raise --consume-ms, or --processes where cores are free"
        )
    if outcome.metrics["disconnects"]:
        yield f"{outcome.metrics['disconnects']:.0f} connections broke"


def verdict_rows(outcome: LoadTestOutcome) -> list[tuple[str, str, str]]:
    """Return (what was required, what was measured, whether it was met)."""
    return [
        (str(verdict.threshold), rounded(verdict.measured), "met" if verdict.met else "missed")
        for verdict in outcome.verdicts
    ]


STYLES = {"met": "green", "missed": "bold red"}


def _show_verdicts(outcome: LoadTestOutcome, console: Console) -> None:
    table = Table("required", "measured", "", box=None, header_style="bold", padding=(0, 2, 0, 1))
    for required, measured, word in verdict_rows(outcome):
        table.add_row(escape(required), measured, f"[{STYLES[word]}]{word}[/]")
    console.print(table)
