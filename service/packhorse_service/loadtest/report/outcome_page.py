"""The result of a load test as one page: no script, nothing loaded from elsewhere, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from packhorse_service.loadtest.report import svg_plots as plots
from packhorse_service.loadtest.report.outcome import LoadTestOutcome, RankOutcome
from packhorse_service.loadtest.report.outcome_table import remarks, rows_of, verdict_rows, waited_rows
from packhorse_service.loadtest.report.svg_plots import Dot, Linear, Log, Plot, across, line, up
from packhorse_service.loadtest.scenario.measured import METRICS
from packhorse_service.text.formatting import rounded, si

__all__ = ["write_page"]

TEMPLATE = "outcome_page.html.jinja"
LEAST_MS = 0.1  # shorter waits are drawn there
WHOLE_S = 1.0
GIB = 1 << 30


def write_page(outcome: LoadTestOutcome, path: Path) -> None:
    """Write the page to ``path``."""
    environment = Environment(
        loader=PackageLoader("packhorse_service.loadtest.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(
        outcome=outcome,
        headline=_headline(outcome),
        rows=list(rows_of(outcome)),
        remarks=list(remarks(outcome)),
        verdicts=verdict_rows(outcome),
        waited=waited_rows(outcome),
        metrics=[(metric.name, rounded(outcome.metrics[metric.name]), metric.meaning) for metric in METRICS.values()],
        plots=list(_plots(outcome)),
        frame=plots,
    )
    path.write_text(page, encoding="utf-8")


def _headline(outcome: LoadTestOutcome) -> list[tuple[str, str]]:
    m = outcome.metrics
    return [
        ("tokens/s", si(m["tokens_per_s"])),
        ("wait p99, ms", rounded(m["wait_p99_ms"])),
        ("fairness", rounded(m["fairness"])),
        ("server CPU-s per M tokens", rounded(m["server_cpu_s_per_mtok"])),
    ]


def _plots(outcome: LoadTestOutcome) -> Iterator[Plot]:
    if outcome.moments:
        yield _throughput(outcome)
    if outcome.waits:
        yield _wait_shares(outcome)
    if outcome.ranks:
        yield _wait_of_ranks(outcome)
    if any(moment.client_memory_bytes is not None for moment in outcome.moments):
        yield _memory(outcome)


def _seconds(outcome: LoadTestOutcome) -> Linear:
    return Linear(0.0, max(outcome.seconds, 1.0))


def _throughput(outcome: LoadTestOutcome) -> Plot:
    # A moment is the second before it; the first begins before the measurement does.
    points = [(m.at_s, m.tokens_per_s) for m in outcome.moments if WHOLE_S <= m.at_s <= outcome.seconds]
    x, y = _seconds(outcome), Linear.upto(rate for _, rate in points)
    return Plot(
        title="Throughput",
        caption="distinct tokens a second, over time" + (_STOPPED if outcome.stop else ""),
        x_label="seconds",
        x=x,
        y=y,
        lines=[line(points, x, y, "a", "tokens/s")],
        bands=outcome.stop,
    )


_STOPPED = "; shaded: ranks were stopped on purpose"


def _wait_shares(outcome: LoadTestOutcome) -> Plot:
    x, y = Log.around((ms for ms, _ in outcome.waits), LEAST_MS), Linear(0.0, 100.0)
    points, below = [], 0.0
    for ms, share in outcome.waits:
        points += [(ms, 100 * below), (ms, 100 * share)]
        below = share
    points.append((x.high, 100.0))
    return Plot(
        title="Waits",
        caption="share of the waits that are not longer, %: the further to the upper left, the better",
        x_label="milliseconds",
        x=x,
        y=y,
        lines=[line(points, x, y, "a", "waits")],
    )


def _wait_of_ranks(outcome: LoadTestOutcome) -> Plot:
    x = Linear(-0.5, max(rank.rank for rank in outcome.ranks) + 0.5)
    y = Log.around((rank.wait_p99_ms for rank in outcome.ranks), LEAST_MS)
    dots = [
        Dot(
            across(x, rank.rank),
            up(y, rank.wait_p99_ms),
            _style(rank),
            f"rank {rank.rank}: wait p99 {rounded(rank.wait_p99_ms)} ms, {rank.micro_batches:,} micro-batches",
        )
        for rank in sorted(outcome.ranks, key=lambda rank: (rank.slow, rank.stopped))  # the odd ones on top
    ]
    present = {dot.style for dot in dots}
    return Plot(
        title="Wait of each rank",
        caption="99 % of its waits are not longer, milliseconds",
        x_label="rank",
        x=x,
        y=y,
        dots=dots,
        legend=[(style, name) for style, name in LEGEND if style in present] if len(present) > 1 else (),
    )


LEGEND = (("a", "others"), ("b", "slow"), ("c", "stopped for a while"))


def _style(rank: RankOutcome) -> str:
    return "b" if rank.slow else "c" if rank.stopped else "a"


def _memory(outcome: LoadTestOutcome) -> Plot:
    during = [moment for moment in outcome.moments if 0 < moment.at_s <= outcome.seconds]
    server = [(m.at_s, m.server_memory_bytes / GIB) for m in during if m.server_memory_bytes is not None]
    clients = [(m.at_s, m.client_memory_bytes / GIB) for m in during if m.client_memory_bytes is not None]
    x, y = _seconds(outcome), Linear.upto(gib for _, gib in [*server, *clients])
    lines = [line(server, x, y, "a", "server and its loaders"), line(clients, x, y, "b", "simulated ranks")]
    return Plot(
        title="Memory",
        caption="GiB, over time; what processes share counts once",
        x_label="seconds",
        x=x,
        y=y,
        lines=[each for each in lines if each.path],
        legend=[(each.style, each.label) for each in lines if each.path],
    )
