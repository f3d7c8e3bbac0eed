# The README's two commands are `make demo` and `make test`. Each builds .venv first if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that run tests at the same time. Most tests wait for processes of their own, the long ones less so: four of
# these are too many for two cores.
WORKERS ?= 4
LONG_WORKERS ?= 3
# What has changed decides which tests of adapters, examples, pages and packaging wait for CI: git | none | all
CHANGED ?= git
SPREAD := --dist worksteal -p tests.progress
PYTEST := $(BIN)/python -m pytest $(SPREAD)
# of tests.daily: what CI asks for
DAILY ?=
VENV_NEMO ?= .venv-nemo
READY_NEMO := $(VENV_NEMO)/.ready
# `make test-torch`: any torch of the package index, in an environment of its own. Where there are builds for CUDA only, it
# takes 6 GB, and `make clean` removes it.
TORCH ?= 2.15.0
RINGS ?= tests/process tests/contracts tests/cluster
VENV_TORCH ?= .venv-$(notdir $(PYTHON))-torch-$(TORCH)
READY_TORCH := $(VENV_TORCH)/.ready

.PHONY: help demo test test-long test-all test-slurm test-nemo test-gpu test-torch coverage soak lint types bench docs docs-links clean

help:
	@echo "make demo      train on three workers, kill one, see the run end as if nothing had happened"
	@echo "make test      lint, types and the tests of every day, but for the longest"
	@echo "make test-long the tests that take longest one by one; CI runs them too"
	@echo "make test-all  all of these, and the slow ring: hours"
	@echo "make test-slurm the tests with a real SLURM, the slow ones too; as root, with slurm-wlm and munge installed"
	@echo "make test-gpu  recovery over NCCL and copies from a GPU; on a machine with one, with a torch for it in $(VENV)"
	@echo "make test-torch TORCH=2.15.0  the tests with real processes over another torch, in an environment of its own (6 GB);"
	@echo "               PYTHON=python3.12 RINGS='tests/pure tests/process' for another Python"
	@echo "make test-nemo the adapter for NeMo, in an environment of its own (2.5 GB)"
	@echo "make coverage  fail unless tests/pure runs every branch of the pure core; no part of make test; five minutes"
	@echo "make soak      an hour: simulated faults with new seeds, a group of 10,000, 800 kills of real workers, 20 deadlines"
	@echo "make docs      the pages of docs/ and the reference as a site in docs/_build/html"
	@echo "make docs-links ask every address that the pages link to; needs a network"
	@echo "make bench     every benchmark, one JSON line each"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0 -e '.[standalone,examples,test,docs]'
	touch $(READY)

# NeMo holds lightning, numpy, protobuf and others at versions that nothing else here wants
$(READY_NEMO): pyproject.toml constraints-nemo.txt
	$(PYTHON) -m venv $(VENV_NEMO)
	$(VENV_NEMO)/bin/python -m pip install --quiet -c constraints-nemo.txt torch==2.13.0
	$(VENV_NEMO)/bin/python -m pip install --quiet --no-deps -r constraints-nemo.txt
	$(VENV_NEMO)/bin/python -m pip install --quiet --no-deps -e .
	touch $(READY_NEMO)

# torch holds setuptools and sympy at versions of its own; the other packages are those of every day
$(READY_TORCH): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_TORCH)
	grep -vE '^(torch|sympy|setuptools)==' constraints.txt > $(VENV_TORCH)/constraints.txt
	$(VENV_TORCH)/bin/python -m pip install --quiet -c $(VENV_TORCH)/constraints.txt torch==$(TORCH)
	$(VENV_TORCH)/bin/python -m pip install --quiet -c $(VENV_TORCH)/constraints.txt torch==$(TORCH) \
		-e '.[standalone,examples,test,docs]' 'setuptools>=77'
	touch $(READY_TORCH)

demo: $(READY)
	$(BIN)/python -m examples.imagenet.demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy --num-workers 2

# lint and types, too
test: $(READY)
	$(BIN)/python -m tests.daily $(DAILY) -- $(SPREAD) -n $(WORKERS) --changed $(CHANGED) \
		--hypothesis-profile daily --forked-workers -m "not slow and (not long or daily)"

# the property tests once more, with all examples
# Several of them keep two cores busy; what is bound to end alone in 120 s gets more here.
test-long: $(READY)
	$(PYTEST) -n $(LONG_WORKERS) --timeout 300 --changed $(CHANGED) -m "(long or hypothesis) and not slow"

# All workers of a job share one GPU, which takes four jobs at a time.
test-gpu: $(READY)
	$(PYTEST) -n $(WORKERS) --dist load --device cuda -m "not slow" tests/process/test_shard_cuda.py \
		tests/process/test_nccl_abort.py tests/process/test_doctor_burn_in.py tests/cluster/test_recovery.py tests/cluster/test_hangs.py \
		tests/cluster/test_salvage.py tests/cluster/test_sharded.py tests/cluster/test_tiers.py \
		tests/contracts/test_kinds_of_checkpoints.py tests/contracts/test_resumed_lives.py

# Some tests bound times: what has failed beside others is run again alone.
test-torch: $(READY_TORCH)
	$(VENV_TORCH)/bin/python -m pytest --dist loadfile -p tests.progress -n $(WORKERS) -m "not slow and not long" $(RINGS) \
		|| $(VENV_TORCH)/bin/python -m pytest --last-failed --last-failed-no-failures none

test-all: lint types
	$(PYTEST) -n $(LONG_WORKERS)

test-slurm: $(READY)
	$(BIN)/python -m pytest tests/slurm

test-nemo: $(READY_NEMO)
	$(VENV_NEMO)/bin/python -m pytest tests/nemo

# tests/pure/pure_core.ini lists what is measured; the long histories of the simulation add no branch to the short ones
coverage: $(READY)
	$(BIN)/python -m coverage run --rcfile=tests/pure/pure_core.ini -m pytest -q --hypothesis-seed=0 tests/pure \
	    -k "not million and not make_each_other_worse and not drains_alone and not however_many and not large_group"
	$(BIN)/python -m coverage report --rcfile=tests/pure/pure_core.ini

soak: $(READY)
	$(BIN)/python -m tests.simulation --events 1000000000 --seconds 600 --hosts 8
	$(BIN)/python -m tests.simulation --members 10000 --nproc 8
	$(BIN)/python -m benchmarks.storm --faults 200
	$(BIN)/python -m benchmarks.deadlines --jobs 0 --deadlines 20

bench: $(READY)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.collectives
	$(BIN)/python -m benchmarks.stream
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.recovery --model 25M
	$(BIN)/python -m benchmarks.sharded --peers torchrun
	$(BIN)/python -m benchmarks.death
	$(BIN)/python -m benchmarks.join
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.checkpoint.replicated
	$(BIN)/python -m benchmarks.replica_transfer
	$(BIN)/python -m benchmarks.memory_tier
	$(BIN)/python -m benchmarks.agent_footprint
	$(BIN)/python -m benchmarks.rendezvous --members 2,32,128 --runs 3 --peers c10d --limit-s 20

docs: $(READY)
	$(BIN)/python -m sphinx -b html -c docs -j auto -W --keep-going -q . docs/_build/html

docs-links: $(READY)
	$(BIN)/python -m sphinx -b linkcheck -c docs -j auto -q . docs/_build/links

clean:
	rm -rf $(VENV) $(VENV_NEMO) .venv-*-torch-* build dist docs/_build *.egg-info
