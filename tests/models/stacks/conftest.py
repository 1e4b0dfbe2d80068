"""Stand-ins before any module of a stack is imported, and the quiet that the stacks' import needs."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings

from tests.models.stacks import stand_ins

# Set by `make stacks`: the stand-ins change a process for good, so they are not for one that runs other tests too.
ENABLED = "PACKHORSE_TEST_STACKS" in os.environ

if ENABLED:
    assert importlib.util.find_spec("megatron.bridge"), "run `make stacks`, which brings the stacks"
    stand_ins.install()
    logging.disable(logging.CRITICAL)
    os.environ.pop("RANK", None)
    with warnings.catch_warnings():
        # The stacks warn of libraries that are absent and of each other's old names.
        warnings.simplefilter("ignore")
        import megatron.bridge.recipes  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
