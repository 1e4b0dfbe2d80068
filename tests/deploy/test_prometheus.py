"""Alerts that fire when they should, and queries that ask for nothing but what the server tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from packhorse_service.protocol.diagnosis import Cause
from tests.deploy.corpus import write_corpus
from tests.deploy.tools import DEPLOY, run
from tests.harness import running_server, write_config

PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = DEPLOY / "grafana" / "packhorse.json"

SIZES = {"seq_length": 64, "global_batch_size": 2, "vocab_size": 256}
NAME = re.compile(r"\b(?:packhorse|process)_\w+")
# rate(x[5m]), increase(x[1h]), and that there was no x before.
GROWTH = re.compile(r"(?:rate|increase)\(\w+(?:\{[^}]*\})?\[[^]]+\]\)|(\w+) unless \1 offset \w+")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Metric -> its type, of everything that a running server tells, which promtool has nothing against."""
    folder = tmp_path_factory.mktemp("told")
    config = write_config(folder, contract=SIZES, sources={"instructions": {"shards": "*.tar", "over_length": "split"}})
    write_corpus(config)
    url = folder / "monitor"
    with running_server(config, "--monitor-file", str(url)), urlopen(f"{url.read_text().strip()}/metrics") as answer:
        text: str = answer.read().decode()
    run(["promtool", "check", "metrics"], stdin=text)
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))


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


def test_queries_ask_for_what_a_server_tells(told: dict[str, str]) -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert asked - told.keys() == set()
    lists = [list_ for query in queries() for list_ in re.findall(r'cause!?=~?"([^"]*)"', query)]
    assert {cause for list_ in lists for cause in list_.split("|")} <= set(Cause)


def test_a_counter_is_only_looked_at_as_it_grows(told: dict[str, str]) -> None:
    counters = {name for name, kind in told.items() if kind == "counter"}
    for query in queries():
        rest = GROWTH.sub("", query)
        assert not set(NAME.findall(rest)) & counters, query


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
