# The contributor's manual: every command makes its own .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test hostile models soak lint types check clean

demo: $(VENV)/installed  ## pack real documents, train four ranks, draw the packs
	$(BIN)/packhorse demo

test: $(VENV)/installed  ## all tests that need nothing but Python (8 minutes at most)
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore tests/fuzz --ignore tests/hostile

hostile: $(VENV)/installed  ## every decoder fuzzed, a server attacked while ranks read from it (four minutes)
	$(BIN)/python -m pytest -n auto --dist worksteal tests/fuzz
	$(BIN)/python -m pytest tests/hostile

models: $(VENV)/models-installed  ## real Transformers and Megatron-Core models on a CPU (a minute)
	$(BIN)/python -m pytest tests/models

SOAK_SECONDS ?= 60

soak: $(VENV)/installed  ## 1,024 simulated ranks: memory, waits and fairness, over a minute
	$(BIN)/python -m pytest tests/soak --soak-seconds $(SOAK_SECONDS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) demo-out

$(VENV)/installed: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	touch $@

$(VENV)/models-installed: $(VENV)/installed tests/models/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -r tests/models/requirements.txt
	touch $@
