"""The status of a server on one screen of a terminal, from 80 columns on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from packhorse.rounding import ceil_div
from packhorse_service.monitoring.headline import STALLED_BY, mean, with_headline
from packhorse_service.monitoring.status import Level, ReaderStatus, ServerStatus, SourceStatus, StreamStatus
from packhorse_service.protocol.diagnosis import ReaderState
from packhorse_service.text.formatting import and_more, duration, human_bytes, percent, pluralise, si
from packhorse_service.text.sparkline import finite, sparkline

__all__ = ["STALE_S", "headlines", "plain", "render"]

STALE_S = 5.0  # the server's loop turns many times a second
CURVE = 50  # columns of the throughput
READERS = 8  # shown
ALIKE = 3
EVENTS = 5
NOTHING = "-"

STYLES = {Level.GOOD: "bold green", Level.NOTICE: "bold yellow", Level.BAD: "bold red"}
STATES = {
    ReaderState.TRAINING: "green",
    ReaderState.RECEIVING: "cyan",
    ReaderState.WAITING: "yellow",
    ReaderState.LOST: "bold red",
}


def render(status: ServerStatus) -> Group:
    """Return a status as it fills one screen."""
    return Group(*_lines(with_headline(status)))


def headlines(status: ServerStatus) -> Iterator[Text]:
    """Yield a line for each stream: how it does, as the page says it."""
    for stream in with_headline(status).streams:
        yield _headline(stream)


def plain(text: str) -> str:
    """Return text on one line, without what a terminal would obey: names come from configurations and readers."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _lines(status: ServerStatus) -> Iterator[RenderableType]:
    yield Text(f"packhorse {plain(status.version)} at {plain(status.endpoint)}, up {duration(status.uptime_s)}", "dim")
    if status.age_s > STALE_S:
        yield Text(
            f"the server's loop has not turned for {duration(status.age_s)}: it is stuck, or stopped", "bold red"
        )
    for stream in status.streams:
        yield from _stream(stream)
    if status.events:
        yield _titled("events", Group(*(_event(*each) for each in _events(status))))


def _stream(stream: StreamStatus) -> Iterator[RenderableType]:
    yield _headline(stream)
    curve = _curve(stream)
    if curve:
        oldest = duration(stream.history[0].age_s)
        yield Text.assemble("  ", (curve, "cyan"), (f" tokens/s, {oldest}", "dim"))
    if stream.readers:
        yield _titled("readers", Group(_states(stream), _readers(stream)))
    if stream.sources:
        yield _titled("sources", _sources(stream))
    yield _titled("counts", _counts(stream))


def _headline(stream: StreamStatus) -> Text:
    level, word, sentence = stream.headline.level, stream.headline.word, stream.headline.sentence
    return Text.assemble((plain(stream.name), "bold"), "  ", (plain(word), STYLES[level]), ": ", plain(sentence))


def _curve(stream: StreamStatus) -> str:
    """Draw the throughput of the last minutes, as many seconds to a column as it takes."""
    rates = [moment.tokens_per_s for moment in stream.history]
    a_column = ceil_div(len(rates), CURVE)
    means = [mean(rates[i : i + a_column]) for i in range(0, len(rates), a_column or 1)]
    top = max(finite(means), default=0.0)
    return sparkline(means, 0.0, top) if top > 0 else ""


def _titled(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, "dim"), Padding(body, (0, 0, 0, 2)))


def _table(*columns: Column) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")


def _right(name: str) -> Column:
    return Column(name, justify="right", no_wrap=True)


# Readers ---------------------------------------------------------------------------------------------------


def _states(stream: StreamStatus) -> Text:
    """Count how many readers are in which state."""
    counts = Counter(reader.state for reader in stream.readers)
    parts = [(f"{counts[state]:,} {state}", STATES.get(state, "")) for state in ReaderState if counts[state]]
    joined = Text(", ").join(Text(*part) for part in parts)
    return Text.assemble(f"{len(stream.readers):,}: ", joined)


def _readers(stream: StreamStatus) -> RenderableType:
    """Tabulate the readers to look at, the first first."""
    table = _table(_right("rank"), Column("at", no_wrap=True), *map(_right, ("takes", "lag", "asked")), Column("is"))
    shown = _shown(stream)
    for reader in shown:
        step, index = reader.taken
        figures = (f"{step:,}.{index}", f"{reader.lag:,}", _asked(reader))
        table.add_row(f"{reader.rank:,}", Text(plain(reader.at)), *figures, _is(reader))
    more = len(stream.readers) - len(shown)
    return Group(table, Text(and_more(more), "dim")) if more > 0 else table


def _shown(stream: StreamStatus) -> list[ReaderStatus]:
    """Return the highlighted readers, a few of many that wait for the same; by rank, where they are all."""
    by_rank = {reader.rank: reader for reader in stream.readers}
    alike: Counter[tuple[ReaderState, str]] = Counter()
    shown = []
    for reader in (by_rank[rank] for rank in stream.notable):
        alike[reader.state, reader.why] += 1
        if not reader.why or alike[reader.state, reader.why] <= ALIKE:
            shown.append(reader)
    all_of_them = len(shown) == len(stream.readers) <= READERS
    return sorted(shown, key=lambda reader: reader.rank) if all_of_them else shown[:READERS]


def _asked(reader: ReaderStatus) -> str:
    """Return how long ago a reader's loop asked; one that is not here never does."""
    if reader.state in (ReaderState.ABSENT, ReaderState.LEFT):
        return NOTHING
    return duration(reader.loop_age_s) if reader.loop_age_s else "now"


def _is(reader: ReaderStatus) -> Text:
    state = Text(str(reader.state), STATES.get(reader.state, ""))
    if reader.state is ReaderState.WAITING:
        state.append(f" {duration(reader.waits_s)}")
    return Text.assemble(state, ": ", plain(reader.why)) if reader.why else state


# Sources, counts, events -----------------------------------------------------------------------------------


def _sources(stream: StreamStatus) -> Table:
    names = ("share", "weight", "samples", "tokens", "epoch", "skipped", "lost")
    table = _table(Column("source", overflow="ellipsis", no_wrap=True), *map(_right, names))
    for source in stream.sources:
        shares = (percent(source.share), percent(source.weight))
        counts = (f"{source.samples:,}", si(source.tokens), _epoch(source), f"{source.skipped:,}", _lost(source))
        table.add_row(Text(plain(source.name)), *shares, *counts)
    return table


def _epoch(source: SourceStatus) -> str:
    of = "" if source.epochs is None else f"/{source.epochs:,}"
    return f"{source.epoch + 1:,}{of} {source.progress:.0%}"


def _lost(source: SourceStatus) -> str:
    return f"{si(source.lost_tokens)} tokens" if source.lost_tokens else "0"


def _counts(stream: StreamStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for name, value in _counted(stream):
        table.add_row(name, Text(plain(value)))
    return table


def _counted(stream: StreamStatus) -> Iterator[tuple[str, str]]:
    yield "steps", f"{stream.steps:,} made, {stream.delivered_steps:,} delivered, {stream.held:,} held"
    yield "tokens", f"{si(stream.tokens)}, {si(stream.loss_tokens)} of them in the loss"
    yield "fill", f"{percent(stream.useful_fill)} useful, {percent(stream.fill)} with alignment padding"
    loaders = stream.loaders
    if loaders.workers:
        waits = f", waits for {loaders.waits_for}" if loaders.waits_for else ""
        yield "loaders", f"{loaders.workers:,}, {loaders.busy:.0%} busy, {loaders.restarts:,} replaced{waits}"
    again = f"{pluralise(stream.reconnects, 'reconnect')}, {pluralise(stream.replayed, 'micro-batch')} sent again"
    yield "readers", f"attempt {stream.attempt:,}, {again}"
    if stream.rejects:
        yield "refused", ", ".join(f"{count:,} by {rule}" for rule, count in stream.rejects.items())
    if stream.stalled_s:
        causes = ((duration(seconds), STALLED_BY.get(cause, cause)) for cause, seconds in stream.stalled_s.items())
        yield "stalled", ", ".join(f"{how_long} by {cause}" for how_long, cause in causes)
    yield "snapshot", human_bytes(stream.snapshot_bytes)


def _events(status: ServerStatus) -> Iterator[tuple[str, str, str]]:
    for event in status.events[:EVENTS]:
        yield duration(event.age_s), event.level, event.text


def _event(age: str, level: str, text: str) -> Text:
    style = "red" if level.lower() == "error" else "yellow"
    return Text.assemble((f"{age} ago ", "dim"), (plain(level), style), f" {plain(text)}")
