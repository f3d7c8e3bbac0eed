# The README's two commands are `make demo` and `make test`. Each builds .venv first if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-all lint types bench clean

help:
	@echo "make demo      train on three workers, kill one, see the run end as if nothing had happened"
	@echo "make test      lint, types and the tests that fit in ten minutes"
	@echo "make test-all  the slow ring too"
	@echo "make bench     every benchmark, one JSON line each"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0 -e '.[standalone,examples,test]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m examples.imagenet.demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -m "not slow"

test-all: lint types
	$(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python -m benchmarks.step_overhead
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.agent_footprint

clean:
	rm -rf $(VENV) build dist *.egg-info
