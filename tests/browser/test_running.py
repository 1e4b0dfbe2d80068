"""The page of a real server, with real ranks that read from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from packhorse import ParallelLayout
from tests.browser.conftest import DEADLINE_MS, Shown
from tests.faults.processes import launching
from tests.harness import wait_until, write_config
from tests.service.corpus import random_lengths, write_source

LAYOUT = ParallelLayout(data=2, context=2)
CONTRACT = {"seq_length": 64, "global_batch_size": 4, "vocab_size": 60_000, "loss_reduction": "per_token"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_source(tmp_path / "docs", random_lengths(1, 3, 60, longest=60))
    sources = {"docs": {"shards": "docs/*.tar", "epochs": "endless"}}
    return write_config(tmp_path, layout={"data": 2, "context": 2}, contract=CONTRACT, sources=sources)


def test_all_ranks_appear_figures_change_and_a_server_that_ends_is_gone(
    browser: Any, config: Path, tmp_path: Path
) -> None:
    with launching(tmp_path / "run") as launcher:
        server = launcher.serve(config)
        for rank in range(LAYOUT.world_size):
            launcher.tap(server.endpoint, rank, LAYOUT, "--delay", "0.05", pairs=False)
        told = server.endpoint_file.with_suffix(".url")
        wait_until(told.exists, "the URL of the page")
        url = told.read_text().strip()
        shown = Shown(browser.new_page())
        shown.page.on("console", lambda message: shown.complaints.append(message.text))
        shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
        shown.page.on("request", lambda request: shown.hosts.add(urlsplit(request.url).netloc))
        shown.page.goto(url)
        shown.wait_for("#word", "training")
        labels = shown.run("[...document.querySelectorAll('#cells .cell')].map(cell => cell.ariaLabel)")
        assert [label.partition(",")[0] for label in labels] == [f"rank {rank}" for rank in range(4)]
        before = shown.text("#sentence")
        shown.page.wait_for_function("was => sentence.innerText !== was", arg=before, timeout=DEADLINE_MS)
        assert shown.complaints == []
        assert shown.hosts == {urlsplit(url).netloc}
        server.kill()
        shown.wait_for("#word", "gone")
        shown.page.close()
