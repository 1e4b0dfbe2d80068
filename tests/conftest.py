"""Settings of every test: what Hypothesis draws, and for how long."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Everybody gets the same result: the same examples each time, on any machine, however slow it is at the moment.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make explore`: other examples each time, and more of them. What it finds becomes an example of its test.
settings.register_profile(
    "explore",
    derandomize=False,
    deadline=None,
    print_blob=True,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
