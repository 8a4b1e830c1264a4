# Everything runs in .venv, which the first command makes with the first Python 3.11-3.13 it finds. `make help` lists what there is.
# Another Python: make test PYTHON3=/path/to/python3.12
# Another torch: make demo TORCH="torch==2.12.1"

SHELL := /bin/sh
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --progress-bar off
# What the demo needs, and everything.
DEMO := $(VENV)/installed-demo
STAMP := $(VENV)/installed
TORCH ?= torch>=2.11,!=2.13.0
PYTHON3 ?= python3.13 python3.12 python3.11 python3 python
# Test processes side by side; each computes on one thread.
JOBS ?= 2

# The editable install names this folder, so a copied or moved checkout (or one whose Python has gone) installs again.
installed_for = $(shell $(PYTHON) -c "print(open('$(1)').read().strip())" 2>/dev/null)
ifneq ($(call installed_for,$(DEMO)),$(CURDIR))
.PHONY: $(DEMO)
endif
ifneq ($(call installed_for,$(STAMP)),$(CURDIR))
.PHONY: $(STAMP)
endif

# What was asked for, also in the calls of make below.
GOALS ?= $(MAKECMDGOALS)
export GOALS

.PHONY: help environment install demo test test-library ci test-slow test-everywhere lint types imports pytest coverage api docs bench dist format clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## make .venv and install farfield with all extras into it

demo: $(DEMO) ## install what it needs; train two small networks on real images, measure the operators, draw what they attend to
	$(VENV)/bin/farfield demo

test: $(STAMP) ## install the rest; format, lint, types, import ladder, tests, doctests, docs, in minutes
	$(MAKE) -j $(JOBS) lint types imports docs
	$(MAKE) pytest

ci: $(STAMP) ## everything that must pass: also long tests, and a short form of test-everywhere
	$(MAKE) -j $(JOBS) lint types imports docs
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) -m "not slow"
	$(PYTHON) tests/everywhere.py --short --jobs $(JOBS)

test-slow: $(STAMP) ## the tests that take minutes: inductor, long grids, trained accuracies
	$(PYTHON) tests/slow.py --jobs $(JOBS)

test-everywhere: $(STAMP) ## the numerical tests as other processors, thread counts and the kernels would run them
	$(PYTHON) tests/everywhere.py --jobs $(JOBS)

lint: $(STAMP)
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types: $(STAMP)
	$(PYTHON) -m mypy

imports: $(STAMP)
	$(VENV)/bin/lint-imports

test-library: $(STAMP) ## the fast tests of the library alone, without those of the papers
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) -m "not slow and not long" tests src

pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(JOBS) -m "not slow and not long"

coverage: $(STAMP) ## the share of lines and branches that the fast tests run, by file, into build/coverage
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(JOBS) -m "not slow and not long" --cov --cov-report term:skip-covered --cov-report html:build/coverage

bench: $(STAMP) ## time operators and networks, and measure the limits, into build/bench; half an hour on a quiet machine
	mkdir -p build/bench
	$(PYTHON) benchmarks/operators.py --backward --json build/bench/operators.json
	$(PYTHON) papers/benchmarks/compact_speed.py --rounds 5 --json build/bench/networks.json
	$(PYTHON) benchmarks/limits.py --json build/bench/limits.json

dist: $(STAMP) ## build the wheel and the source archive into dist, and check what is in them
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist
	$(PYTHON) -m build --no-isolation --outdir dist papers
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) tests/wheel.py dist

api: $(STAMP) ## list names and parameters removed or changed since a revision: make api AGAINST=v0.2.0
	$(VENV)/bin/griffe check farfield --search src --against $(or $(AGAINST),$(shell git describe --tags --abbrev=0 2>/dev/null),HEAD)

docs: $(STAMP) ## build the documentation into docs/_build/html; a warning is an error
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs docs/_build/html

format: $(STAMP) ## let ruff format the code and mend what it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove .venv, caches and built pages
	rm -rf $(VENV) build dist docs/_build docs/auto_gallery .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests docs papers -name __pycache__ -type d -prune -exec rm -rf {} +

# What an installation is made of: when it changes, it is made again.
SOURCES := pyproject.toml papers/pyproject.toml hatch_build.py $(wildcard src/farfield/ops/fast/cpu/*)

$(DEMO): $(SOURCES)
	@$(MAKE) --no-print-directory environment
	@echo "Installing farfield with what the demo needs into $(VENV): once, 0.2 GB"
	$(INSTALL) -e . -e ./papers
	@printf '%s\n' "$(CURDIR)" > $(DEMO)

# Everything, and so what the demo needs.
$(STAMP): $(SOURCES)
	@$(MAKE) --no-print-directory environment
	@echo "Installing farfield and everything that the tests use into $(VENV): once, a few minutes"
	$(INSTALL) -e ".[dev]" -e "./papers[text,timm]"
	@printf '%s\n' "$(CURDIR)" | tee $(DEMO) > $(STAMP)

# .venv with torch, which comes first, since the kernels are compiled with its headers.
# Debian and Ubuntu split ensurepip off into python3-venv: such a Python is passed over, and named if no other is found.
# A CPU build of torch needs one of torchvision, whose compiled operators do not load otherwise: both or none.
environment:
	@set -e; \
	if ! $(PYTHON) -m pip --version >/dev/null 2>&1; then \
	  found=; bare=; \
	  for candidate in $(PYTHON3); do \
	    "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	    bare=$${bare:-$$candidate}; \
	  done; \
	  if [ -z "$$found" ] && [ -n "$$bare" ]; then \
	    version=$$("$$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "make: $$bare (Python $$version) cannot make a virtual environment: it lacks ensurepip." >&2; \
	    echo "  fix: install it, on Debian or Ubuntu: apt-get install python$$version-venv" >&2; exit 1; \
	  fi; \
	  if [ -z "$$found" ]; then \
	    echo "make: farfield needs Python 3.11, 3.12 or 3.13; none of these is one: $(PYTHON3)." >&2; \
	    echo "  fix: install one, or name it: make $(GOALS) PYTHON3=/path/to/python3.12" >&2; exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$found ($$("$$found" --version))"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@if $(PIP) show --quiet torch 2>/dev/null; then exit 0; fi; \
	vision=; \
	if ! nvidia-smi >/dev/null 2>&1; then \
	  vision=$$($(PIP) index versions torchvision 2>/dev/null | tr -d ' ' | tr ',:' '\n\n' | grep '+cpu$$' | head -n 1); \
	fi; \
	if [ -n "$$vision" ]; then \
	  echo "No GPU: downloading the CPU builds of torch and torchvision, about 0.2 GB"; \
	  $(INSTALL) "torchvision==$$vision" "$(TORCH)" && exit 0; \
	fi; \
	echo "Downloading torch: 3 GB with CUDA's libraries, as PyPI has it for Linux, which take 5 GB on the disk"; \
	echo "  smaller without a GPU: make $(GOALS) PIP_EXTRA_INDEX_URL=INDEX, the CPU index that pytorch.org names"; \
	$(INSTALL) "$(TORCH)"
