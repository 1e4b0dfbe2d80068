# The contributor's manual: every command makes its own .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test explore long models stacks browser deploy soak lint types check docs docs-site clean

demo: $(VENV)/installed  ## pack real documents, train four ranks, draw the packs
	$(BIN)/packhorse demo

test: $(VENV)/installed  ## all tests that need nothing but Python (8 minutes at most)
	$(BIN)/python -m pytest -n auto --dist worksteal $(LONG:%=--ignore %) --ignore tests/browser --ignore tests/deploy

explore: $(VENV)/installed  ## property tests with other examples each time, and more of them
	$(BIN)/python -m pytest -n auto --dist worksteal -m hypothesis --hypothesis-profile explore --timeout 0 tests $(EXPLORE)

LONG := tests/fuzz tests/faults tests/service/loadtest tests/hostile tests/service/demo tests/docs/test_getting_started.py \
  tests/benchmarks tests/service/packing/test_packing_quality.py tests/protocol/test_schedules.py \
  $(addprefix tests/end_to_end/test_,evaluation.py state.py handshake.py tap.py security.py readers.py)

long: $(VENV)/installed  ## decoders fuzzed, processes killed, schedules, states, load tests, demo, tutorial; a server attacked
	$(BIN)/python -m pytest -n auto --dist worksteal $(filter-out tests/hostile,$(LONG))
	$(BIN)/python -m pytest tests/hostile  # alone: it compares the throughput of ranks

models: $(VENV)/models-installed  ## real Transformers and Megatron-Core models on a CPU (3 minutes)
	$(BIN)/python -m pytest tests/models

stacks: $(VENV)/stacks-installed  ## rules held against the newest Megatron-Bridge and Megatron-Core's own validation (a minute)
	$(BIN)/python -m tests.models.stacks.newest
	PYTHONPATH=$(VENV)/stacks PACKHORSE_TEST_STACKS=1 $(BIN)/python -m pytest tests/models/stacks

browser: $(VENV)/browser-installed  ## the status page in a headless Chromium, which must be on this machine (a minute)
	$(BIN)/python -m pytest tests/browser

deploy: $(VENV)/deploy-installed  ## what deploy/ holds, checked by each system's own tools; a real Slurm job (3 minutes)
	$(BIN)/python -m pytest tests/deploy

SOAK_SECONDS ?= 60

soak: $(VENV)/installed  ## 1,024 simulated ranks: memory, waits and fairness, over a minute
	$(BIN)/python -m pytest tests/soak --soak-seconds $(SOAK_SECONDS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

check: lint types test long

docs: $(VENV)/installed  ## what docs/ says of the code, written anew from it
	$(BIN)/python -m tools.docs docs/*.md

docs-site: $(VENV)/site-installed  ## the documentation as a site, in site/: strict, no broken link
	PYTHONPATH=. $(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf $(VENV) demo-out site

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	touch $@

$(VENV)/models-installed: $(VENV)/installed tests/models/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/models/requirements.txt
	touch $@

# The stacks themselves lie in a folder of their own, on no path but that of `make stacks`.
STACKS := tests/models/stacks
$(VENV)/stacks-installed: $(VENV)/models-installed $(STACKS)/requirements.txt $(STACKS)/wheels.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r $(STACKS)/requirements.txt
	rm -rf $(VENV)/stacks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/stacks --no-deps \
	  --ignore-requires-python --python-version 3.12 --only-binary=:all: -r $(STACKS)/wheels.txt
	touch $@

$(VENV)/site-installed: $(VENV)/installed tools/docs/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tools/docs/requirements.txt
	touch $@

$(VENV)/browser-installed: $(VENV)/installed tests/browser/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/browser/requirements.txt
	touch $@

$(VENV)/deploy-installed: $(VENV)/models-installed tests/deploy/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/deploy/requirements.txt
	touch $@
