"""What the server may hold at most: printed by ``check``, refused over ``memory_limit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from packhorse.errors import ConfigError
from packhorse_service.check.memory_bound import (
    PROGRAM_BYTES,
    REMEDIES,
    Component,
    MemoryBound,
    refuse_over_limit,
    server_memory,
)
from packhorse_service.commands import app
from packhorse_service.config.serve_config import load_config
from tests.service.shards_on_disk import ids_member, save_tiny_tokenizer, write_tar

MIB = 1 << 20
STEP_SLOTS = 16 * 4096


def feed(folder: Path, contract: dict[str, Any] | None = None, **sections: Any) -> Path:
    """A configuration; its shards need not exist."""
    sized = {"seq_length": 4096, "global_batch_size": 16, "vocab_size": 32_000, **(contract or {})}
    content = {"contract": sized, "sources": {"docs": {"shards": "no-such.tar"}}, **sections}
    path = folder / "feed.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def run(command: str, path: Path, *options: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [command, str(path), *options])


def parts(path: Path) -> dict[str, int]:
    derived = json.loads(run("check", path, "--json").stdout)["derived"]
    sizes: dict[str, int] = derived["memory_bytes"]
    assert sum(sizes.values()) == derived["memory_bound_bytes"]
    return sizes


def test_every_part_that_a_setting_decides_grows_with_that_setting(tmp_path: Path) -> None:
    usual = parts(feed(tmp_path))
    sources = {"docs": {"shards": "no-such.tar", "open_shards": 32}}
    grown: dict[Component, dict[str, Any]] = {
        Component.STEPS: {"steps_ahead": 8},
        Component.MAKING: {"contract": {"global_batch_size": 64}},
        Component.DELIVERY: {"layout": {"tensor": 4}},
        Component.CONNECTIONS: {"layout": {"tensor": 4}},
        Component.LOOKAHEAD: {"packing": {"lookahead": 256}},
        Component.WINDOW: {"packing": {"window": 4}},
        Component.BLOCKS: {"sources": sources},
        Component.LOADERS: {"loading": {"workers": 8}},
    }
    for part, settings in grown.items():
        more = parts(feed(tmp_path, **settings))
        assert more[part] > usual.get(part, 0), part
        assert all(more[other] >= size for other, size in usual.items()), part


def test_a_step_ahead_holds_its_views_and_its_rows(tmp_path: Path) -> None:
    held = [parts(feed(tmp_path, steps_ahead=steps))[Component.STEPS] for steps in (2, 3, 4)]
    assert held[1] - held[0] == held[2] - held[1] >= STEP_SLOTS * (2.125 + 4 + 1)


@pytest.mark.parametrize(
    ("layout", "contract", "of_slot"),
    [
        ({"tensor": 4}, {}, 2.125),  # all of them get one view
        ({"context": 2}, {"partition": "zigzag"}, 2 * 2.125 - 0.125),  # slices carry their labels
        ({"pipeline": 2}, {}, 2 + 2.125),  # the last stage gets labels, and no tokens to make them of
    ],
)
def test_each_view_of_a_row_counts_once(
    tmp_path: Path, layout: dict[str, int], contract: dict[str, Any], of_slot: float
) -> None:
    one = parts(feed(tmp_path, {"segment_multiple": 4}))[Component.STEPS] - 3 * STEP_SLOTS * 2.125
    several = parts(feed(tmp_path, {"segment_multiple": 4, **contract}, layout=layout))[Component.STEPS]
    assert several - one == pytest.approx(3 * STEP_SLOTS * of_slot, rel=0.15)  # and offsets


def test_keys_of_open_shards_are_counted_by_the_size_of_the_largest(tmp_path: Path) -> None:
    for number, samples in enumerate((1, 64, 128)):
        files = [(f"{number}-{i}.npy", ids_member([1, 2, 3])) for i in range(samples)]
        write_tar(tmp_path / f"part-{number}.tar", files)
    source = {"shards": "part-*.tar", "open_shards": 2}
    path = feed(tmp_path, sources={"docs": source})
    assert parts(path)[Component.KEYS] >= (64 + 128) * 128
    assert Component.KEYS not in parts(feed(tmp_path))


def test_a_remote_shard_is_not_asked_for_by_check(tmp_path: Path) -> None:
    path = feed(tmp_path, sources={"docs": {"shards": ["no-such-scheme://bucket/a.tar"]}})
    assert Component.KEYS not in parts(path)


def test_a_tokenizer_is_held_by_the_server_and_by_each_loader(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path / "tokenizer.json")
    held = [
        parts(feed(tmp_path, tokenizer="tokenizer.json", loading={"workers": workers}))[Component.TOKENIZER]
        for workers in (0, 1, 3)
    ]
    assert held == [held[0], 2 * held[0], 4 * held[0]]


def test_further_streams_add_to_it_and_the_program_counts_once(tmp_path: Path) -> None:
    one = parts(feed(tmp_path))
    streams = {"validation": {"sources": {"held": {"shards": "no-such.tar"}}}}
    both = parts(feed(tmp_path, streams=streams))
    assert both[Component.PROGRAM] == one[Component.PROGRAM] == PROGRAM_BYTES
    assert all(both[part] == 2 * size for part, size in one.items() if part != Component.PROGRAM)


def test_a_person_reads_sizes_with_units(tmp_path: Path) -> None:
    shown = run("check", feed(tmp_path)).stdout
    assert "memory program" in shown
    assert "80.0 MiB" in shown


# The limit ---------------------------------------------------------------------------------------------


def test_check_and_serve_refuse_what_may_come_to_hold_more_than_the_limit(tmp_path: Path) -> None:
    write_tar(tmp_path / "part-0.tar", [("a.npy", ids_member([1, 2, 3]))])
    path = feed(tmp_path, memory_limit="100MiB", sources={"docs": {"shards": "part-0.tar"}})
    for command in ("check", "serve"):
        done = run(command, path)
        assert done.exit_code == 1
        assert "memory_limit=100.0 MiB must be at least" in done.stderr
        assert "steps ahead" in done.stderr
        assert "lower steps_ahead or contract.global_batch_size" in done.stderr


def test_a_limit_that_is_the_bound_itself_is_kept(tmp_path: Path) -> None:
    bound = sum(parts(feed(tmp_path)).values())
    assert run("check", feed(tmp_path, memory_limit=bound)).exit_code == 0
    assert run("check", feed(tmp_path, memory_limit=bound - 1)).exit_code == 1


@pytest.mark.parametrize(("written", "size"), [("8GiB", 8 << 30), ("500 MB", 500_000_000), (4096, 4096)])
def test_a_limit_is_a_size_with_a_unit_or_bytes(tmp_path: Path, written: str | int, size: int) -> None:
    assert load_config(feed(tmp_path, memory_limit=written)).memory_limit == size


@pytest.mark.parametrize("written", ["8 gigs", "-1", 0])
def test_a_limit_that_is_no_size_is_refused_by_name(tmp_path: Path, written: str | int) -> None:
    with pytest.raises(ConfigError, match="memory_limit="):
        load_config(feed(tmp_path, memory_limit=written))


def test_a_refusal_names_the_largest_part_first(tmp_path: Path) -> None:
    bound = MemoryBound({Component.LOOKAHEAD: MIB, Component.BLOCKS: 3 * MIB, Component.STEPS: 2 * MIB})
    with pytest.raises(ConfigError) as refused:
        refuse_over_limit(load_config(feed(tmp_path, memory_limit="4MiB")), bound)
    _, *lines = str(refused.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "blocks 3.0 MiB",
        "steps ahead 2.0 MiB",
        "lookahead 1.0 MiB",
    ]
    assert all(
        REMEDIES[part] in line
        for part, line in zip((Component.BLOCKS, Component.STEPS, Component.LOOKAHEAD), lines, strict=True)
    )


def test_a_server_without_streams_is_the_program_alone() -> None:
    assert server_memory([]) == MemoryBound({Component.PROGRAM: PROGRAM_BYTES})
