# Everything a person does here starts with `make help`. Needs Python >= 3.11 and git; nothing else.

# The first interpreter that is new enough; `make PYTHON=/path/to/python ...` overrides it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
PEERS := .venv-peers
VLLM := .venv-vllm
VLLM_MODEL := build/vllm/model
RUNTIME := $(VENV)/.runtime-stamp
DEV := $(VENV)/.dev-stamp
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate

# uv looks for packages in the folders and pages that pip is configured to look in: torch's CPU builds,
# which the public index does not have, may be in one of them.
FIND_LINKS = UV_FIND_LINKS="$$($(BIN)/python -m pip config list \
	| sed -n "s/^[^=]*find-links='\(.*\)'/\1/p" | sed 's/\\n/ /g' | xargs | tr ' ' ',')"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo up test test-peers test-vllm test-browser check fuzz bench bench-proxy bench-siblings bench-routers agreement cost-model consistency simulate simulate-full eviction analyze chaos compose-check lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Results go to build/TARGET; those of bench, bench-*, agreement and cost-model to build/bench."

setup: $(DEV)  ## make .venv from the lock files (runtime and development)

demo: $(RUNTIME)  ## replay one trace with four policies (TRACE=file; DEMO_ARGS=--help)
	@$(BIN)/python -m deploy.demo $(DEMO_ARGS)

up: $(RUNTIME)  ## start the local fleet, keep it until Ctrl-C (UP_ARGS=--help)
	@$(BIN)/python -m deploy.local $(UP_ARGS)

test: $(DEV)  ## all tests; they start what they need (TEST_ARGS=...)
	$(BIN)/python -m pytest $(TEST_ARGS)

test-peers: $(DEV) $(PEERS)/.stamp  ## tests with Dynamo's mocker, a foreign source of KV events
	$(BIN)/python -m pytest -m peers tests/peers $(TEST_ARGS)

test-vllm: $(DEV) $(VLLM)/.stamp $(VLLM_MODEL)/.stamp  ## tests with two real vLLM engines on the CPU (Linux x86-64)
	$(BIN)/python -m pytest -m vllm tests/vllm -p no:randomly $(TEST_ARGS)

test-browser: $(DEV)  ## tests of the live page in a real Chromium; pictures in build/browser
	@for one in "$$TIMESTABLE_CHROMIUM" chromium chromium-browser google-chrome google-chrome-stable; do \
		command -v "$$one" >/dev/null 2>&1 && exit 0; done; \
	test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing Chromium (once)" \
		&& { apt-get update -qq; apt-get install -qq -y --no-install-recommends chromium >/dev/null; } || { \
		echo "make test-browser needs a Chromium: install one (Debian, Ubuntu: sudo apt install chromium),"; \
		echo "or name it: make test-browser TIMESTABLE_CHROMIUM=/path/to/chromium"; exit 1; }
	$(BIN)/python -m pytest -m browser tests/browser -p no:randomly $(TEST_ARGS)

check: $(DEV)  ## format, lint, types, import directions, spelling
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

fuzz: $(DEV)  ## decoder and block table at length, half an hour (FUZZ_INPUTS=1000000)
	$(BIN)/python tests/fuzz/decoder_fuzz.py --inputs $(or $(FUZZ_INPUTS),1000000)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest --timeout 3600 tests/property/test_block_table.py \
		tests/property/test_block_table_laws.py tests/contract/test_block_table_index.py

bench: $(DEV)  ## cost of index, decisions and reservations (BENCH_ARGS=--quick)
	$(BIN)/python tests/benchmarks/index_bench.py $(BENCH_ARGS)
	$(BIN)/python tests/benchmarks/cluster_bench.py $(BENCH_ARGS)
	$(BIN)/python tests/benchmarks/peer_bench.py $(BENCH_ARGS)
	$(BIN)/python tests/benchmarks/reserve_bench.py $(BENCH_ARGS)
	$(BIN)/python tests/benchmarks/fleet_bench.py $(BENCH_ARGS)
	$(BIN)/python -m pytest -m benchmark tests/benchmarks -p no:randomly

bench-proxy: $(DEV) $(PEERS)/.stamp  ## what a proxy costs, beside its peers, 20 minutes (BENCH_ARGS=--quick: four)
	$(BIN)/python tests/benchmarks/proxy_bench.py $(BENCH_ARGS)

bench-siblings: $(DEV)  ## effect of --in_flight_credit, 4 minutes (BENCH_ARGS=--quick)
	$(BIN)/python tests/benchmarks/sibling_bench.py $(BENCH_ARGS)

bench-routers: $(DEV)  ## 1, 2, 4 and 8 real routers side by side, 20 minutes (BENCH_ARGS=--quick: four)
	$(BIN)/python tests/benchmarks/router_bench.py $(BENCH_ARGS)

agreement: $(DEV)  ## the demo's workload in virtual and in real time, 6 minutes (BENCH_ARGS=--quick)
	$(BIN)/python tests/benchmarks/agreement_bench.py $(BENCH_ARGS)

cost-model: $(DEV)  ## simulated engines beside published measurements of real ones
	$(BIN)/python tests/benchmarks/cost_model_bench.py

consistency: $(RUNTIME)  ## 1 to 8 routers in virtual time (CONSISTENCY_ARGS=--quick)
	$(BIN)/python -m loadgen consistency $(CONSISTENCY_ARGS)

simulate: $(RUNTIME)  ## the policy lab: policies x workloads x loads in virtual time (SIMULATE_ARGS=...)
	$(BIN)/python -m loadgen simulate $(SIMULATE_ARGS)

simulate-full: $(RUNTIME)  ## every policy and staleness, hours; goes on after an abort
	$(BIN)/python -m loadgen simulate --scenario full --output build/simulate-full $(SIMULATE_ARGS)

eviction: $(RUNTIME)  ## eviction policies against cache size, 10 minutes (EVICTION_ARGS="--workloads [agents]": fewer)
	$(BIN)/python -m loadgen simulate --scenario eviction --output build/eviction $(EVICTION_ARGS)

analyze: $(RUNTIME)  ## what a workload reuses (TRACE="file ..."; a generated one unless given; ANALYZE_ARGS=...)
	@test -n "$(TRACE)" || $(BIN)/python -m loadgen generate --out build/analyze/chat_mix.jsonl.gz \
		--workload chat_mix --requests_count 10000
	$(BIN)/python -m loadgen analyze $(or $(TRACE),build/analyze/chat_mix.jsonl.gz) $(ANALYZE_ARGS)

chaos: $(DEV)  ## every fault under load, 10 minutes (CHAOS_ARGS=--quick)
	@$(BIN)/python -m deploy.chaos $(CHAOS_ARGS)

compose-check: $(RUNTIME)  ## prove deploy/compose.yaml with a Docker engine (skipped without one)
	@$(BIN)/python -m deploy.compose_check

lock: $(VENV)/.uv-stamp  ## pin and hash the newest allowed versions into the lock files
	echo uv | $(COMPILE) --upgrade - --output-file requirements-uv.lock
	$(COMPILE) --upgrade requirements.in --output-file requirements.lock
	$(COMPILE) --upgrade requirements-dev.in --constraint requirements.lock \
		--output-file requirements-dev.lock
	echo aisimulate | $(COMPILE) --upgrade requirements-peers.in --excludes /dev/stdin \
		--output-file requirements-peers.lock
	printf 'torchaudio\ntorchcodec\ntorchvision\ntriton\n' | $(FIND_LINKS) \
		$(subst --universal,--python-platform x86_64-manylinux_2_28,$(COMPILE)) --upgrade \
		requirements-vllm.in --excludes /dev/stdin --output-file requirements-vllm.lock

clean:  ## remove the environment, caches and build results
	rm -rf $(VENV) $(PEERS) $(VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
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

# $(call install-into,VENV,FLAGS,ENVIRONMENT): what the lock names; only uv is given the environment.
define install-into
{ test -x $(UV) && $(3) $(UV) pip install --quiet --python $(1)/bin/python $(2) --require-hashes -r $<; } || { \
	echo "installing $< with pip instead of uv"; \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) --require-hashes -r $<; }
endef

$(RUNTIME): requirements.lock $(VENV)/.uv-stamp
	@$(call install-into,$(VENV))
	@touch $@

$(DEV): requirements-dev.lock $(RUNTIME)
	@$(call install-into,$(VENV))
	@touch $@

# The lock is complete, and names all that is wanted of what the packages ask for: hence --no-deps.
$(PEERS)/.stamp: requirements-peers.lock $(VENV)/.uv-stamp
	@echo "setting up $(PEERS) (once)"
	@$(PYTHON) -m venv $(PEERS)
	@$(call install-into,$(PEERS),--no-deps)
	@touch $@

# vLLM and torch for CPUs: one lock for one platform, which is where there are wheels of both.
# Complete like that of the peers; what is left out (torchvision and such) wants CUDA.
VLLM_BASE ?= $(shell command -v python3.11 || echo $(PYTHON))

$(VLLM)/.stamp: requirements-vllm.lock $(VENV)/.uv-stamp
	@$(VLLM_BASE) -c 'import platform, sys; sys.exit(sys.implementation.name != "cpython" \
		or sys.version_info[:2] != (3, 11) or sys.platform != "linux" or platform.machine() != "x86_64")' || { \
		echo "make test-vllm needs CPython 3.11 on Linux x86-64: elsewhere there are no CPU wheels of vLLM and torch to pin."; \
		echo "Name such an interpreter with make VLLM_BASE=/path/to/python3.11 test-vllm, or run these tests with a vLLM you have:"; \
		echo "  TIMESTABLE_VLLM_PYTHON=/path/to/its/python TIMESTABLE_VLLM_MODEL=/folder $(BIN)/python -m pytest -m vllm tests/vllm"; \
		echo "after making the model: /path/to/its/python tests/vllm/tiny_model.py /folder"; exit 1; }
	@echo "setting up $(VLLM) (once, 2 GB)"
	@$(VLLM_BASE) -m venv $(VLLM)
	@$(call install-into,$(VLLM),--no-deps,$(FIND_LINKS)) || { \
		echo "torch's CPU build has to be where pip looks: set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where you have it."; exit 1; }
	@touch $@

$(VLLM_MODEL)/.stamp: tests/vllm/tiny_model.py $(VLLM)/.stamp
	@echo "making a tiny model in $(VLLM_MODEL)"
	@$(VLLM)/bin/python $< $(VLLM_MODEL)
	@touch $@
