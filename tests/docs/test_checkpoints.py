"""The evaluation of the page on checkpoints really runs, beside the configuration that the README begins with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from packhorse_service.prepare.prepare import prepare
from tests.harness import DEADLINE_S, running_server
from tests.service.shards_on_disk import save_tiny_tokenizer
from tests.test_readme import README

PAGE = README.parent / "docs" / "checkpoints.md"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


SCRIPT = """
import json
from packhorse import BatchContract, Feed, ParallelLayout

trained = []
train_step = trained.append
passes = []
with Feed(ENDPOINT, layout=ParallelLayout(data=1, context=2), arrays="numpy") as feed:
    def evaluate(mb):
        passes.append(mb.step)
        return 0 if mb.filler else mb.num_loss_tokens

    evaluated = None
%s
    json.dump({"steps": len(trained), "evaluated": int(evaluated), "read": len(passes), "state": checkpoint}, OUT)
"""


def test_the_evaluation_covers_the_same_targets_in_each_pass_on_both_ranks(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    for name in ("docs", "chat", "held-out"):
        rows = "\n".join(json.dumps({"text": f"{name} horse {i} " * (i + 1)}) for i in range(40))
        (tmp_path / f"{name}.jsonl").write_text(rows)
        prepare([tmp_path / f"{name}.jsonl"], tmp_path, name=name, max_shard_samples=20, progress=False)
    config = tmp_path / "feed.yaml"
    served = "listen: tcp://127.0.0.1:*\nlayout: {data: 1, context: 2}\n"
    config.write_text(served + blocks(README, "yaml")[0] + blocks(PAGE, "yaml")[0])
    (snippet,) = [block for block in blocks(PAGE, "python") if "validation" in block]
    body = SCRIPT % re.sub("^(?=.)", "    ", snippet, flags=re.MULTILINE)
    with running_server(config) as server:
        script = f"import sys\nENDPOINT, OUT = {server.endpoint!r}, sys.stdout\n" + body
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]
        printed = [json.loads(rank.communicate(timeout=DEADLINE_S)[0]) for rank in ranks]
        assert server.process.wait(DEADLINE_S) == 0
    assert printed[0] == printed[1]
    (found, _) = printed
    evaluations = found["steps"] // 2
    assert evaluations >= 2
    assert found["evaluated"] > 0
    assert found["read"] % evaluations == 0
    ((name, (step, index), _, _),) = found["state"]["feed"]["further"]
    steps_of_a_pass = found["read"] // evaluations // 2
    assert (name, index, step) == ("validation", 0, evaluations * (steps_of_a_pass + 1))
