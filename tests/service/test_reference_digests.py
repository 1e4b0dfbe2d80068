"""Orders, rows and views of many configurations, against digests recorded of an earlier version.

What a trainer's checkpoint refers to must not change by a version that does not say so. Where it has to,
``python -m tests.service.test_reference_digests`` records anew, and the change is one of the CHANGELOG.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.contract.layout import Coordinates
from packhorse.errors import PackhorseError
from packhorse_service.framing import FramedStep, view_key
from packhorse_service.pipeline.plan import StreamPlan
from tests.service.corpus import make_plan, random_lengths, run_plan, write_source
from tests.service.shards_on_disk import write_tar

RECORDED = Path(__file__).with_name("reference_digests.json")
STEPS = 10
CONFIGURATIONS = 72
RESUMED_BEHIND = 3  # steps

Settings = dict[str, Any]

PHRASE = "the pack horse carries packs over the pass and the trainers wait for none of them"
WORDS = PHRASE.split()
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": i, "content": f"<|{name}|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i, name in enumerate(["unknown", "endoftext", "im_start", "im_end"])
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {
            word: i
            for i, word in enumerate(
                ["<|unknown|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(set(WORDS)), "user", "assistant"]
            )
        },
        "unk_token": "<|unknown|>",
    },
}


def write_corpus(base: Path) -> None:
    """Ids with and without masks, plain text and chats: the same bytes each time."""
    write_source(base / "ids", random_lengths(3, 3, 60, longest=60))
    write_source(base / "masked", random_lengths(5, 2, 50, longest=48), first=12_000, masked=True)
    write_source(base / "long", random_lengths(7, 2, 30, longest=300), first=30_000)
    chance = random.Random(11)
    (base / "text").mkdir()
    (base / "chat").mkdir()
    for shard in range(2):
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(2, 40))) for _ in range(40)]
        write_tar(base / "text" / f"{shard}.tar", [(f"{i:03d}.txt", text.encode()) for i, text in enumerate(texts)])
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in texts]
        members = [(f"{i:03d}.json", json.dumps({"messages": chat}).encode()) for i, chat in enumerate(chats)]
        write_tar(base / "chat" / f"{shard}.tar", members)
    (base / "tokenizer.json").write_text(json.dumps(TOKENIZER))


def draw_settings(chance: random.Random) -> Settings:
    """One configuration of the grid; not every one holds together."""
    packing = chance.choice(["online", "online", "in_batch", "concat", "concat", "none"])
    contract: Settings = {"packing": packing, "seq_length": chance.choice([64, 96, 128])}
    layout = {"data": chance.choice([1, 1, 2, 4]), "context": chance.choice([1, 2]), "tensor": 1, "pipeline": 1}
    layout["pipeline"] = chance.choice([1, 1, 2])
    contract["micro_batch_size"] = chance.choice([2, 4]) if packing == "in_batch" else 1
    if packing in ("concat", "none"):
        contract["isolate_documents"] = packing == "none" or chance.random() < 0.5
        if packing == "none" or not contract["isolate_documents"]:
            contract["micro_batch_size"] = chance.choice([1, 2])
    contract["global_batch_size"] = contract["micro_batch_size"] * layout["data"] * chance.choice([1, 2, 4])
    contract["partition"] = chance.choice(["whole", "zigzag", "contiguous"])
    contract["vocab_size"] = chance.choice([60_000, 100_000])
    contract["remainder"] = chance.choice(["pad", "drop"])
    if chance.random() < 0.3:
        contract["segment_multiple"] = chance.choice([4, 8])
    if chance.random() < 0.2:
        contract |= {"static_shapes": True, "max_segments": chance.choice([8, 24])}
    elif chance.random() < 0.3:
        contract["pad_to_max_length"] = False
    if chance.random() < 0.2:
        contract["tail_padding"] = "extend_last"
    source_names = chance.sample(["ids", "masked", "long", "text", "chat"], chance.choice([1, 1, 2, 3]))
    sources = {
        name: {
            "shards": f"{name}/*.tar",
            "weight": chance.choice([1, 2, 5]),
            "over_length": "split" if name == "long" else chance.choice(["split", "truncate_right", "drop"]),
            "epochs": chance.choice([1, 2]),
            "shuffle": chance.random() < 0.7,
            "open_shards": chance.choice([1, 2]),
        }
        for name in source_names
    }
    drawn: Settings = {"contract": contract, "layout": layout, "sources": sources, "seed": chance.randint(0, 99)}
    drawn["packing"] = {"algorithm": "fifo_exact_tail", "lookahead": chance.choice([None, 3, 16])}
    if packing == "online":
        drawn["packing"]["algorithm"] = chance.choice(
            ["fifo_exact_tail", "fifo_exact_tail", "first_fit_decreasing", "best_fit_decreasing"]
        )
        drawn["packing"]["tail_slots"] = chance.choice([0, 0, 8])
    if packing in ("online", "in_batch"):
        drawn["packing"]["window"] = chance.choice([1, 1, 2, 4])
    drawn["mixing"] = {"on_end": chance.choice(["go_on", "stop"])}
    drawn["keys"] = chance.random() < 0.3
    if {"text", "chat"} & set(source_names):
        drawn["tokenizer"] = {"file": "tokenizer.json", "eos_token": "<|endoftext|>"}
    return drawn


def plan_of(base: Path, drawn: Settings) -> StreamPlan:
    """The plan of one configuration, over the corpus."""
    sections = {name: value for name, value in drawn.items() if name != "sources"}
    return make_plan(base, drawn["sources"], **sections)


def parts_of(step: FramedStep, plan: StreamPlan) -> Iterator[bytes]:
    """All rows that a step sends to anybody, in a fixed order. Its snapshot's format may change by a version."""
    layout = plan.layout
    for data, context, stage in np.ndindex(layout.data, layout.context, layout.pipeline):
        for view in step.views_of(view_key(Coordinates(data, context, 0, stage), plan.contract, layout)):
            body = view.body
            counts = (body.num_tokens, body.num_loss_tokens, body.local_loss_tokens, body.step_tokens)
            place = (body.step, body.index, body.step_loss_tokens, body.max_seqlen, body.slots, body.filler)
            arrays = [(entry.name, entry.dtype, entry.length, entry.offset) for entry in body.arrays]
            yield json.dumps([*map(int, (*counts, *place)), arrays]).encode()
            yield body.row_digest
            yield bytes(view.payload)


def digest_of_steps(steps: list[FramedStep], plan: StreamPlan) -> str:
    """One digest of all that these steps send."""
    hashed = hashlib.blake2b(digest_size=16)
    for step in steps:
        for part in parts_of(step, plan):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def outcome_of(base: Path, drawn: Settings) -> Settings:
    """What one configuration gives, from its beginning and from a snapshot in the middle."""
    plan = plan_of(base, drawn)
    steps = run_plan(plan, limit=STEPS)
    resumed = run_plan(plan, steps[RESUMED_BEHIND - 1].snapshot, limit=STEPS - RESUMED_BEHIND)
    assert digest_of_steps(resumed, plan) == digest_of_steps(steps[RESUMED_BEHIND:], plan)
    return {"steps": len(steps), "digest": digest_of_steps(steps, plan)}


CASES: list[Settings] = json.loads(RECORDED.read_text()) if RECORDED.exists() else []


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus."""
    folder = tmp_path_factory.mktemp("reference")
    write_corpus(folder)
    return folder


NAMES = [f"{i}-{case['settings']['contract']['packing']}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_each_configuration_gives_what_it_gave(base: Path, case: Settings) -> None:
    assert outcome_of(base, case["settings"]) == case["outcome"]


def test_the_configurations_cover_the_modes() -> None:
    assert len(CASES) == CONFIGURATIONS
    assert {case["settings"]["contract"]["packing"] for case in CASES} == {"online", "in_batch", "concat", "none"}
    assert any(case["settings"]["packing"].get("window", 1) > 1 for case in CASES)
    assert any("chat" in case["settings"]["sources"] for case in CASES)


def record() -> None:
    """Draw configurations until enough of them hold together, and write down what they give."""
    chance, cases = random.Random(2026), list[Settings]()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        while len(cases) < CONFIGURATIONS:
            drawn = draw_settings(chance)
            try:
                plan_of(Path(folder), drawn)
            except (PackhorseError, ValueError):
                continue  # a combination that the contract or the configuration refuses
            try:
                cases.append({"settings": drawn, "outcome": outcome_of(Path(folder), drawn)})
            except IndexError:
                continue  # ends before the snapshot to resume from
            sys.stderr.write(f"{len(cases)} {drawn['contract']['packing']}\n")
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    record()
