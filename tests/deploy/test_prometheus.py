"""Alerts that fire when they should, and queries that ask for nothing but what the server tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.tools import DEPLOY, run

PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "packhorse.json"

# What the server tells, by the names of /metrics.
COUNTERS = {
    *("packhorse_steps_total", "packhorse_microbatches_total", "packhorse_delivered_steps_total"),
    *("packhorse_tokens_total", "packhorse_loss_tokens_total", "packhorse_slots_total"),
    *("packhorse_replayed_microbatches_total", "packhorse_reconnects_total", "packhorse_rejects_total"),
    *("packhorse_source_samples_total", "packhorse_source_tokens_total"),
    *("packhorse_source_skipped_samples_total", "packhorse_source_lost_tokens_total"),
    *("packhorse_reader_wait_seconds_total", "packhorse_stall_seconds_total", "packhorse_loader_restarts_total"),
}
GAUGES = {
    *("packhorse_fill_ratio", "packhorse_useful_fill_ratio", "packhorse_steps_held", "packhorse_step"),
    *("packhorse_attempt", "packhorse_snapshot_bytes", "packhorse_readers", "packhorse_readers_connected"),
    *("packhorse_waiting_readers", "packhorse_reader_lag_microbatches", "packhorse_reader_lag_microbatches_max"),
    *("packhorse_reader_loop_age_seconds", "packhorse_reader_loop_age_seconds_max"),
    *("packhorse_reader_silence_seconds", "packhorse_reader_silence_seconds_max", "packhorse_reader_connected"),
    *("packhorse_loader_workers", "packhorse_loader_busy_ratio", "packhorse_data_loop_age_seconds"),
    *("packhorse_connections", "packhorse_stream_info", "packhorse_build_info"),
}
OF_THE_PROCESS = {
    *("process_open_fds", "process_max_fds", "process_resident_memory_bytes"),
    *("process_cpu_seconds_total", "process_start_time_seconds"),
}
CAUSES = {"network", "packing", "loading", "slow_peer", "trainer", "startup"}
NAME = re.compile(r"\b(?:packhorse|process)_\w+")


def alerts() -> list[dict[str, Any]]:
    described = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())
    return [rule for group in described["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    yield from dashboard_queries()


def test_prometheus_takes_its_configuration_and_the_alerts() -> None:
    run(["promtool", "check", "config", PROMETHEUS / "prometheus.yaml"])
    run(["promtool", "check", "rules", PROMETHEUS / "alerts.yaml"])


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    run(["promtool", "test", "rules", PROMETHEUS / "alerts_test.yaml"])


def test_every_alert_is_seen_to_fire_and_says_what_to_do() -> None:
    seen = set(re.findall(r'alertname="(\w+)"', (PROMETHEUS / "alerts_test.yaml").read_text()))
    assert seen == {rule["alert"] for rule in alerts()}
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


def test_queries_ask_for_what_the_server_tells() -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert asked <= COUNTERS | GAUGES | OF_THE_PROCESS
    causes = {
        cause
        for query in queries()
        for list_ in re.findall(r'cause!?=~?"([^"]*)"', query)
        for cause in list_.split("|")
    }
    assert causes <= CAUSES


def test_a_counter_is_only_looked_at_as_it_grows() -> None:
    for query in queries():
        growing = re.sub(r"(?:rate|increase)\(\w+(?:\{[^}]*\})?\[[^]]+\]\)", "", query)
        assert not set(NAME.findall(growing)) & COUNTERS, query


def test_the_dashboard_asks_in_promql(tmp_path: Path) -> None:
    """As recording rules, which promtool reads; Grafana's variables stand for plain values."""
    asked = (query.replace("$__rate_interval", "5m") for query in dashboard_queries())
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(asked)]
    written = tmp_path / "rules.yaml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(["promtool", "check", "rules", written])


def test_the_panels_do_not_overlap_and_each_explains_itself() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels():
        at = panel["gridPos"]
        cells = [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        assert not [taken[cell] for cell in cells if cell in taken], panel["title"]
        taken.update(dict.fromkeys(cells, panel["title"]))
        assert panel["type"] == "row" or panel["description"], panel["title"]
    assert max(x for x, _ in taken) < 24, "Grafana's grid has 24 columns"


@pytest.mark.parametrize(
    "name", ["packhorse_data_loop_age_seconds", "packhorse_waiting_readers", "packhorse_fill_ratio"]
)
def test_what_an_operator_must_know_is_watched(name: str) -> None:
    assert [rule for rule in alerts() if name in rule["expr"]]
