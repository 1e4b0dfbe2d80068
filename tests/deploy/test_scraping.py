"""A real Prometheus scrapes a running server, and answers what the dashboard asks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest
import yaml

from packhorse import ParallelLayout
from tests.deploy.test_prometheus import DASHBOARD, PROMETHEUS, dashboard_queries
from tests.deploy.tools import free_port, require
from tests.faults.processes import launching
from tests.harness import DEADLINE_S, wait_until, write_config
from tests.service.corpus import random_lengths, write_source

LAYOUT = ParallelLayout(data=2)
EVERY_S = 1
DELIVERED = "rate(packhorse_delivered_steps_total[10s]) > 0"
ONLY_WHERE_SOMEBODY_WAS_REFUSED = "packhorse_rejects_total"


class Prometheus:
    """One that scrapes a monitor each second, as our example says but for the address."""

    def __init__(self, folder: Path, monitor: str) -> None:
        described = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
        described["global"] = {"scrape_interval": f"{EVERY_S}s", "evaluation_interval": f"{EVERY_S}s"}
        described["rule_files"] = [str(PROMETHEUS / "alerts.yaml")]
        (job,) = described["scrape_configs"]
        job["static_configs"] = [{"targets": [urlsplit(monitor).netloc]}]
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(described))
        self._url = f"http://127.0.0.1:{free_port()}"
        command = [
            require("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={urlsplit(self._url).netloc}",
        ]
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=folder)

    def _get(self, path: str) -> Any:
        try:
            with urlopen(self._url + path, timeout=10) as answer:
                return json.loads(answer.read())["data"]
        except OSError:
            if self._process.poll() is not None:
                raise
            return None  # it starts

    def answers(self, query: str) -> list[Any]:
        data = self._get(f"/api/v1/query?query={quote(query)}")
        return data["result"] if data else []

    def rules(self) -> list[dict[str, Any]]:
        data = self._get("/api/v1/rules")
        return [rule for group in data["groups"] for rule in group["rules"]] if data else []

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        self._log.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Of a server that two ranks read from."""
    folder = tmp_path_factory.mktemp("scraped")
    write_source(folder / "docs", random_lengths(1, 3, 60, longest=60))
    contract = {"seq_length": 64, "global_batch_size": 4, "vocab_size": 60_000}
    sources = {"docs": {"shards": "docs/*.tar", "epochs": "endless"}}
    config = write_config(folder, layout={"data": 2}, contract=contract, sources=sources)
    with launching(folder / "run") as launcher:
        server = launcher.serve(config)
        for rank in range(LAYOUT.world_size):
            launcher.tap(server.endpoint, rank, LAYOUT, "--delay", "0.05", pairs=False)
        scraping = Prometheus(folder, server.endpoint_file.with_suffix(".url").read_text().strip())
        try:
            wait_until(
                lambda: bool(scraping.answers("rate(packhorse_delivered_steps_total[10s]) > 0")), "a few scrapes"
            )
            yield scraping
        finally:
            scraping.close()


@pytest.mark.parametrize("query", dashboard_queries())
def test_the_dashboards_queries_have_answers(prometheus: Prometheus, query: str) -> None:
    asked = query.replace("$__rate_interval", "10s").replace("$instance", ".*").replace("$stream", ".*")
    found = prometheus.answers(asked)
    assert found or ONLY_WHERE_SOMEBODY_WAS_REFUSED in query, asked


def test_the_variables_of_the_dashboard_have_values(prometheus: Prometheus) -> None:
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = variable["definition"].removeprefix("label_values(").rstrip(")").rsplit(", ", 1)
            found = prometheus.answers(selector.replace("$instance", ".*"))
            assert {sample["metric"][label] for sample in found}, variable["name"]


def test_figures_are_those_of_the_run(prometheus: Prometheus) -> None:
    (connected,) = prometheus.answers("packhorse_readers_connected")
    assert connected["metric"]["stream"] == "train"
    assert float(connected["value"][1]) == 2
    (fill,) = prometheus.answers("packhorse_useful_fill_ratio")
    assert 0.5 < float(fill["value"][1]) <= 1
    (speed,) = prometheus.answers("rate(packhorse_tokens_total[10s])")
    assert float(speed["value"][1]) > 0


def test_the_alerts_are_loaded_and_none_fails_or_fires(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        rules = prometheus.rules()
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    wait_until(evaluated, "a turn of each rule")
    assert {rule["type"] for rule in prometheus.rules()} == {"alerting"}
    firing = [rule["name"] for rule in prometheus.rules() if rule["state"] == "firing"]
    assert firing == [], "the run is well"
