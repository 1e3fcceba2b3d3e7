# The two commands of the README: `make demo` and `make test`.  Each does all set-up, once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test clean

# The first interpreter that runs and is new enough; the pins are tried on 3.11.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)
PY := .venv/bin/python

# $(call phase,name,command): run a command and print how long it took.
define phase
@echo "== $(1)"; start=$$(date +%s); status=0; ( $(2) ) || status=$$?; \
echo "== $(1): $$(( $$(date +%s) - start )) s$$( [ $$status -eq 0 ] || echo ', failed' )"; exit $$status
endef

help:
	@echo "make demo   train a model over real Horovod processes, dense beside compressed"
	@echo "make test   lint, types, docs, unit tests and tests over real Horovod processes"
	@echo "make setup  only the set-up that both begin with"
	@echo "make clean  remove .venv and every other thing that these made (the built Horovod stays in your cache)"

setup:
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.10 or newer was found. Install one (Debian, Ubuntu: sudo apt-get install python3 python3-venv python3-dev), or say which to use: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	$(call phase,set-up,$(PYTHON) -m hvd_adaptive.setup)

demo: setup
	$(call phase,demo,$(PY) examples/demo.py)

test: export OMP_NUM_THREADS ?= 1
test: setup
	$(call phase,lint,$(PY) -m ruff check . && $(PY) -m ruff format --check .)
	$(call phase,types,$(PY) -m mypy)
	$(call phase,docs,NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet)
	$(call phase,unit,$(PY) -m pytest tests/unit -n auto)
	$(call phase,parallel,$(PY) -m pytest tests/parallel)

clean:
	rm -rf .venv .venv.lock runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
