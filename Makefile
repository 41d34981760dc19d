# Everything a fresh machine needs: `make demo` and `make test` make .venv and install what they use.
# Variables: PYTHON (a Python >= 3.10), TORCH and TORCH_ARGS (how torch is installed for the tests; TORCH= leaves it
# out), MPI (which MPI the MPI tests use; MPI= leaves it out), PIP_ARGS (for every pip), TESTS, WORKERS, PYTEST_ARGS.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
RANKS ?= 4
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
MPI ?= mpi4py mpich
PIP_ARGS ?=
TESTS ?= tests
WORKERS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# Benchmarks do not run beside other tests, and their plug-in says so with a warning, which is an error here.
PYTEST := $(BIN)/python -m pytest -p no:benchmark $(PYTEST_ARGS)
PARALLEL := -n $(WORKERS) --dist worksteal
PACKAGING := pyproject.toml setup.cfg gfkernels/_version.py

.PHONY: help demo test test-guest check guest lint bench docs coverage clean

help: ## Shows the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

demo: $(VENV)/.installed ## Installs into .venv and runs 4 ranks: a verified sweep and a small table.
	$(BIN)/gfkernels demo -n $(RANKS)

test: $(VENV)/.installed-test $(VENV)/.installed-peers ## Installs what the tests need and runs all of them.
	@scripts/system-packages test
	$(PYTEST) $(PARALLEL) -m "not guest" $(TESTS)

test-guest: guest ## Runs the tests that need Soft-RoCE, in emulated machines: about a quarter of an hour.
	$(PYTEST) tests/guest

guest: $(VENV)/.installed-test ## Prepares the emulated machine with Soft-RoCE in which RDMA is tested.
	@PIP_ARGS='$(PIP_ARGS)' $(BIN)/python tests/guest/guest_setup.py

check: lint ## The quick tier, under two minutes: static checks and the tests not marked slow.
	$(PYTEST) $(PARALLEL) -m "not slow and not guest" $(TESTS)

lint: $(VENV)/.installed-dev ## Static checks: ruff, mypy, import-linter, codespell, house rules.
	scripts/check

bench: $(VENV)/.installed-test ## Benchmarks: host kernels and plan building, then a sweep over sizes.
	$(BIN)/python -m pytest bench --benchmark-columns=median,iqr,rounds --benchmark-sort=name $(PYTEST_ARGS)
	$(BIN)/gfkernels bench -n 2

docs: $(VENV)/.installed ## Writes docs/api.md and docs/configuration.md from the docstrings.
	$(BIN)/python scripts/make-api-docs

coverage: $(VENV)/.installed-dev $(VENV)/.installed-peers ## Which lines of the interpreted code the tests reach.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -p no:benchmark $(PYTEST_ARGS) $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean: ## Removes .venv and all that was built; the cache of compiled code stays (docs/install.md says where).
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		.benchmarks .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@scripts/system-packages venv "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(PACKAGING)
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) -e '.[dev]'
	@touch $@

# What only some tests use. Where it cannot be had these tests are skipped, and the end of the run lists them.
$(VENV)/.installed-peers: $(VENV)/.installed-test
	@if [ -n "$(TORCH)" ]; then $(PIP) '$(TORCH)' $(TORCH_ARGS) \
		|| echo "make: $(TORCH) cannot be installed here; tests with torch tensors will be skipped" >&2; fi
	@if [ -n "$(MPI)" ]; then $(PIP) $(MPI) \
		|| echo "make: $(MPI) cannot be installed here; tests under an MPI launcher will be skipped" >&2; fi
	@touch $@
