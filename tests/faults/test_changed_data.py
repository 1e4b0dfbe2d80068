"""The data or its rendering changes while a job runs: the change is refused by name, never served as the stream."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.faults.job import Job, job_of
from tests.faults.oracle import check_served_right
from tests.faults.processes import Launcher
from tests.faults.truth import SEQ_LENGTH, Truth, write_feed
from tests.harness import failing_server
from tests.service.corpus import random_lengths, write_source
from tests.service.shards_on_disk import save_tiny_tokenizer, write_tar

SAMPLES = 24
TEXTS = {"texts": {"shards": "texts.tar"}}


def refused(job: Job, what: str) -> None:
    """Every rank ends with an error that says ``what``, and was handed nothing but rows of the stream it began."""
    for tap in job.taps:
        assert tap.exit_code() == 1
        assert what in tap.last_words()
    check_served_right(job.truth, job.taps)


def test_shards_rewritten_with_the_same_names_and_sizes(tmp_path: Path, launcher: Launcher) -> None:
    """The new server finds other data where it begins: digests tell, before any row is made again."""
    data = tmp_path / "data"
    truth = Truth.written(data, SAMPLES)
    sizes = [path.stat().st_size for path in sorted(data.glob("plain/*.tar"))]
    with job_of(truth, launcher) as job:
        job.start("--delay", "0.02")
        job.wait_taken(5)
        job.server.kill()
        write_source(data / "plain", random_lengths(1, 3, SAMPLES, longest=SEQ_LENGTH), first=2, masked=True)
        assert [path.stat().st_size for path in sorted(data.glob("plain/*.tar"))] == sizes
        job.lead_to(job.serve())
        refused(job, "these differ: manifest")
        job.server.kill()


def texts(folder: Path) -> Path:
    """Documents, and a tokenizer for them."""
    lines = ((f"{i}.txt", f"the pack horse carries pack {i} to the trainers".encode()) for i in range(300))
    write_tar(folder / "texts.tar", lines)
    save_tiny_tokenizer(folder / "tokenizer.json")
    contract = {"vocab_size": 300}
    return write_feed(folder, sources=TEXTS, tokenizer="tokenizer.json", contract=contract)


def test_a_tokenizer_swapped_for_another_of_the_same_size(tmp_path: Path, launcher: Launcher) -> None:
    data = tmp_path / "data"
    data.mkdir()
    truth = Truth.of(texts(data), Counter())
    with job_of(truth, launcher) as job:
        job.start("--delay", "0.02")
        job.wait_taken(5)
        job.server.kill()
        tokenizer = json.loads((data / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (data / "tokenizer.json").write_text(json.dumps(tokenizer))
        job.lead_to(job.serve())
        refused(job, "tokenizer")
        job.server.kill()


def test_a_template_that_asks_for_the_date_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    write_tar(tmp_path / "chats.tar", [("0.json", b'[{"role": "user", "content": "what day is it?"}]')])
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "today.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    sources = {"chats": {"shards": "chats.tar", "chat_template": "today.jinja"}}
    config = write_feed(tmp_path, sources=sources, tokenizer="tokenizer.json", contract={"vocab_size": 300})
    assert "date" in failing_server(config)
