# Every target sets itself up: the only things needed beforehand are Python (3.11 to 3.13) and pip.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all lint docs bench clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/installed  ## compare eleven methods on clients with skewed data, unequal steps and speeds; writes a report
	$(BIN)/fedstride compare examples/demo.toml --out runs/demo --resume

# A process a core, so a thread each: more wait for each other.
test: .venv/installed  ## the tests that take a few minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-all: .venv/installed  ## all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m "slow or not slow"

lint: .venv/installed  ## formatting, style, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/installed  ## write the pages that come from docstrings
	$(BIN)/python docs/generate.py

# pfl-research lives in an environment of its own; Flower's simulation fits ours.
.venv-pfl/installed: constraints.txt
	$(PYTHON) -m venv .venv-pfl
	.venv-pfl/bin/pip install --quiet torch
	PIP_CONSTRAINT= .venv-pfl/bin/pip install --quiet "torch==2.13.0" "pfl[pytorch]==0.6.0"
	touch $@

bench: .venv/installed .venv-pfl/installed  ## the same work beside pfl-research, Flower's simulation and a plain loop
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/peers.py --pfl .venv-pfl/bin/python --pictures docs/performance

clean:
	rm -rf .venv .venv-pfl .pytest_cache .ruff_cache .mypy_cache
