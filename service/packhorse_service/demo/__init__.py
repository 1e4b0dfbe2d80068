"""``packhorse demo``: shards from this machine's standard library, a server, four trainer ranks, a picture.

The path through this folder:

1. ``corpus`` makes shards of documents and chats, and a tokenizer
2. ``packhorse serve`` starts as a process of its own, with the ``feed.yaml`` written here (``processes``)
3. ``trainer`` runs four times, data 2 by context 2; it trains the GPT of ``model`` and is the script to copy
4. ``step_lines`` is what the ranks write down, ``demo_progress`` shows it
5. ``packs`` has the first of them as the ranks got them, ``demo_picture`` draws them
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from packhorse.errors import StartTimeout
from packhorse_service.demo.corpus import CorpusSizes, make_corpus
from packhorse_service.demo.demo_progress import TrainingProgress
from packhorse_service.demo.packs import load_packs
from packhorse_service.demo.step_lines import RankStepReport, Tail, lines_file
from packhorse_service.processes import ChildFailed, Children, pause, start_server, stop_signals

__all__ = ["DemoSizes", "run_demo"]

DATA, CONTEXT = 2, 2
RANKS = DATA * CONTEXT
POLL_S = 0.1
MONITOR = "monitor"  # the file with the URL of the status page
INTERRUPTED = 130  # the exit code that shells give a Ctrl-C
LEFTOVERS = ("docs-*.tar", "chat-*.tar", "rank-*.jsonl", "slice-*.npz", "endpoint", MONITOR)  # of a run before this one

FEED = """\
# What the demo serves. `packhorse serve feed.yaml` does it again.
listen: tcp://127.0.0.1:*
tokenizer: {{file: tokenizer.json, eos_token: "<|endoftext|>"}}
layout: {{data: {data}, context: {context}}}
contract: {{seq_length: {seq_length}, global_batch_size: {global_batch_size}, partition: zigzag}}
loading: {{workers: 1}}  # the four ranks need the cores
packing: {{lookahead: 16}}  # packs' worth of samples to choose from
keys: true  # the picture colours segments by source
sources:
  docs: {{shards: "docs-*.tar", weight: 3, over_length: split}}
  chat: {{shards: "chat-*.tar", weight: 1}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSizes:
    """Sizes of a demo. The defaults end within a minute on two cores."""

    seq_length: int = 1024
    global_batch_size: int = 4
    corpus: CorpusSizes = field(default_factory=CorpusSizes)


def run_demo(out: Path, steps: int | None = None, sizes: DemoSizes | None = None) -> int:
    """Run the demo, leave ``packs.png`` and all it made in ``out``, return the exit code.

    ``steps``: stop after so many; ``None`` trains until the stream ends.
    """
    console = Console()
    try:
        return _run(console, out, steps, sizes or DemoSizes())
    except (ChildFailed, StartTimeout) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; no process is left")
        return INTERRUPTED


def _run(console: Console, out: Path, steps: int | None, sizes: DemoSizes) -> int:
    began = time.monotonic()
    work = out / "run"
    _prepare(work)
    corpus = make_corpus(work, sizes.corpus)
    console.print(f"{corpus.documents} documents and {corpus.chats} chats from the standard library, in {work}")
    progress = TrainingProgress(console)
    with stop_signals() as asked, Children(work) as children:
        endpoint = _serve(children, work, sizes, asked)
        children.start_ranks(_trainer(endpoint, work, steps, sizes), RANKS)
        console.print(f"packhorse serve at {endpoint}, {RANKS} trainer ranks: data {DATA} by context {CONTEXT}")
        console.print(f"watch it at {(work / MONITOR).read_text(encoding='utf-8').strip()}")
        _follow(children, work, progress, asked)
    console.print(progress.table())
    _draw(work, out / "packs.png")
    console.print(f"{out / 'packs.png'} shows the first packs. All of it took {time.monotonic() - began:.0f} s.")
    return 0


def _prepare(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    for pattern in LEFTOVERS:
        for path in work.glob(pattern):
            path.unlink()


def _serve(children: Children, work: Path, sizes: DemoSizes, asked: threading.Event) -> str:
    """Start the server; its endpoint, once it listens."""
    config = work / "feed.yaml"
    config.write_text(
        FEED.format(data=DATA, context=CONTEXT, seq_length=sizes.seq_length, global_batch_size=sizes.global_batch_size),
        encoding="utf-8",
    )
    _, endpoint = start_server(children, [str(config), "--monitor-file", str(work / MONITOR)], work, asked)
    return endpoint


def _trainer(endpoint: str, work: Path, steps: int | None, sizes: DemoSizes) -> list[str]:
    """Return the command of a rank."""
    options: dict[str, object] = {
        "--endpoint": endpoint,
        "--report": work,
        "--data": DATA,
        "--context": CONTEXT,
        "--seq-length": sizes.seq_length,
        "--global-batch-size": sizes.global_batch_size,
        "--vocabulary": sizes.corpus.vocabulary,
    }
    if steps is not None:
        options["--steps"] = steps
    words = [word for option, value in options.items() for word in (option, str(value))]
    return [sys.executable, "-m", "packhorse_service.demo.trainer", *words]


def _follow(children: Children, work: Path, progress: TrainingProgress, asked: threading.Event) -> None:
    """Show what the ranks report until every process has ended."""
    tails = [Tail(work / lines_file(rank)) for rank in range(RANKS)]
    running = True
    with progress.showing():
        while running:
            running = not children.all_ended()  # before the last look at the files, so that no line is missed
            for line in (line for tail in tails for line in tail.lines()):
                progress.add(RankStepReport.parse(line))
            progress.line()
            pause(asked, POLL_S)


def _draw(work: Path, path: Path) -> None:
    # matplotlib takes seconds to load, and the ranks import this package too
    from packhorse_service.demo.demo_picture import draw_packs

    draw_packs(load_packs(work), Tokenizer.from_file(str(work / "tokenizer.json")), path)
