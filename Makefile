# Everything a person does here starts with `make help`. Needs Python >= 3.11 and git; nothing else.

# The first interpreter that is new enough; `make PYTHON=/path/to/python ...` overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
RUNTIME := $(VENV)/.runtime-stamp
DEV := $(VENV)/.dev-stamp
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo up test check bench compose-check lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV)  ## make .venv from the lock files (runtime and development)

demo: $(RUNTIME)  ## replay one trace with four policies (TRACE=file; DEMO_ARGS=--help)
	@$(BIN)/python -m deploy.demo $(DEMO_ARGS)

up: $(RUNTIME)  ## start the local fleet, keep it until Ctrl-C (UP_ARGS=--help)
	@$(BIN)/python -m deploy.local $(UP_ARGS)

test: $(DEV)  ## all tests; they start what they need (TEST_ARGS=...)
	$(BIN)/python -m pytest $(TEST_ARGS)

check: $(DEV)  ## format, lint, types, import directions, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(DEV)  ## measure; writes build/bench/summary.json (BENCH_ARGS=--quick)
	$(BIN)/python tests/benchmarks/index_bench.py $(BENCH_ARGS)
	$(BIN)/python -m pytest -m benchmark tests/benchmarks -p no:randomly

compose-check: $(RUNTIME)  ## prove deploy/compose.yaml with a Docker engine (skipped without one)
	@$(BIN)/python -m deploy.compose_check

lock: $(VENV)/.uv-stamp  ## pin and hash the newest allowed versions into the three lock files
	echo uv | $(COMPILE) --upgrade - --output-file requirements-uv.lock
	$(COMPILE) --upgrade requirements.in --output-file requirements.lock
	$(COMPILE) --upgrade requirements-dev.in --constraint requirements.lock \
		--output-file requirements-dev.lock

clean:  ## remove the environment, caches and build results
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .benchmarks .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# uv installs the locked set several times faster than pip, which installs only uv. Where there is
# no uv for the platform, or uv cannot reach the package index that pip is configured for, pip does it.
$(VENV)/.uv-stamp: requirements-uv.lock
	@test -n "$(PYTHON)" || { echo "Timestable needs Python 3.11 or newer as python3 (or: make PYTHON=/path/to/python ...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than Python 3.11 or does not run; name a newer one: make PYTHON=/path/to/python ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $< \
		|| echo "uv cannot be installed here; pip will do, more slowly"
	@touch $@

define install
@{ test -x $(UV) && $(UV) pip install --quiet --python $(BIN)/python --require-hashes -r $<; } || { \
	echo "installing $< with pip instead of uv"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<; }
@touch $@
endef

$(RUNTIME): requirements.lock $(VENV)/.uv-stamp
	$(install)

$(DEV): requirements-dev.lock $(RUNTIME)
	$(install)
