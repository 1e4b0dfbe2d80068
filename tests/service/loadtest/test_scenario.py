"""A scenario comes from a file, from options, or both; what is wrong with it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from packhorse import ConfigError, ParallelLayout
from packhorse_service.loadtest.scenario.measured import METRICS
from packhorse_service.loadtest.scenario.scenario import Share, load_scenario
from packhorse_service.loadtest.scenario.thresholds import Threshold, judge, parse_threshold


def in_file(folder: Path, **fields: Any) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def test_a_file_holds_the_whole_test(tmp_path: Path) -> None:
    scenario = load_scenario(
        in_file(
            tmp_path,
            layout={"data": 4, "tensor": 2},
            consume_ms=250,
            slow_ranks="10%",
            seconds=60,
            synthetic={"seq_length": 1024},
            require=["wait_p99_ms < 20", "fairness>=0.95"],
        ),
        {},
    )
    assert scenario.layout == ParallelLayout(data=4, tensor=2)
    assert (scenario.consume_ms, scenario.seconds, scenario.slow_ranks) == (250, 60, Share(part=0.1))
    assert scenario.require == (Threshold("wait_p99_ms", "<", 20), Threshold("fairness", ">=", 0.95))
    assert scenario.synthetic is not None
    assert (scenario.synthetic.seq_length, scenario.synthetic.mean_length) == (1024, 500)


def test_options_win_over_the_file_field_by_field(tmp_path: Path) -> None:
    file = in_file(tmp_path, ranks=4, consume_ms=250, synthetic={"seq_length": 1024, "mean_length": 100})
    scenario = load_scenario(file, {"layout": "data=2,context=2", "synthetic": {"mean_length": 50}})
    assert scenario.layout == ParallelLayout(data=2, context=2), "the file's ranks are said otherwise"
    assert scenario.consume_ms == 250
    assert scenario.synthetic is not None
    assert (scenario.synthetic.seq_length, scenario.synthetic.mean_length) == (1024, 50)


def test_the_feed_of_a_file_is_relative_to_it(tmp_path: Path) -> None:
    assert load_scenario(in_file(tmp_path, feed="feeds/a.yaml"), {}).feed == tmp_path / "feeds/a.yaml"


def test_without_anything_eight_ranks_read_synthetic_data() -> None:
    scenario = load_scenario(None, {})
    assert (scenario.layout, scenario.feed, scenario.endpoint) == (ParallelLayout(data=8), None, None)


def test_of_a_feed_the_layout_is_its_own() -> None:
    assert load_scenario(None, {"feed": "feed.yaml"}).layout is None


@pytest.mark.parametrize(("given", "count"), [("10%", 7), (3, 3), ("3", 3), ("0%", 0), ("0.1%", 1), ("100%", 64)])
def test_slow_ranks_are_a_number_or_a_share(given: object, count: int) -> None:
    assert load_scenario(None, {"slow_ranks": given}).slow_ranks.of(64) == count


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 0}, "ranks=0: input should be greater than or equal to 1"),
        ({"ranks": 2000}, "ranks=2000: input should be less than or equal to 1024"),
        ({"layout": "data=512,tensor=4"}, "has 2,048 ranks, must have at most 1,024"),
        ({"layout": "data=2,sequence=2"}, "'sequence=2' must be one of data, context, tensor, pipeline"),
        ({"ranks": 2, "layout": "data=2"}, "ranks=2 and layout are given; give one of them"),
        ({"ranks": 2, "feed": "feed.yaml"}, "ranks: 'feed.yaml' has the layout; change it there"),
        ({"feed": "feed.yaml", "synthetic": {"seq_length": 64}}, "synthetic: the data are those of feed"),
        ({"endpoint": "tcp://a:1", "transport": "ipc"}, "transport='ipc': endpoint='tcp://a:1' says it"),
        ({"slow_ranks": "many"}, "slow_ranks='many': value error, must be a number of ranks, or a share"),
        ({"slow_ranks": "101%"}, "must be a number of ranks, or a share of them as in 10%"),
        ({"consume_msec": 4}, "consume_msec: unknown field; did you mean 'consume_ms'?"),
        ({"synthetic": {"seq_len": 4}}, "synthetic.seq_len: unknown field; did you mean 'seq_length'?"),
        ({"require": ["wait < 3"]}, "no metric 'wait'; there are tokens_per_s, "),
        ({"require": ["wait_p99_ms == 3"]}, "must be METRIC OPERATOR NUMBER, as in 'wait_p99_ms < 20'"),
        ({"require": ["wait_p99_ms < fast"]}, "'fast' must be a number"),
        ({"require": ["wait_p99_ms < nan"]}, "'nan' must be a number"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_scenario(None, options)
    assert str(refused.value).startswith("command line:\n")
    assert said in str(refused.value)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = in_file(tmp_path, jitter=2, seconds=-1)
    with pytest.raises(ConfigError, match=r"(?s)scenario\.yaml:\n.*jitter=2.*\n.*seconds=-1"):
        load_scenario(file, {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scenario '.*missing\.yaml' cannot be read"):
        load_scenario(tmp_path / "missing.yaml", {})


@pytest.mark.parametrize(
    ("text", "value", "met"),
    [
        ("fairness<1", 1.0, False),
        ("fairness <= 1", 1.0, True),
        ("fairness>1", 1.0, False),
        ("fairness >=1e0", 1.0, True),
        ("errors < 1", None, False),
    ],
)
def test_a_threshold_holds_or_not_and_never_where_nothing_is_known(text: str, value: float | None, met: bool) -> None:
    threshold = parse_threshold(text)
    (verdict,) = judge((threshold,), {**dict.fromkeys(METRICS), threshold.metric: value})
    assert (verdict.met, verdict.measured) == (met, value)
