# The one front door. Everything here runs from a clean checkout; nothing else needs to be prepared.
#   make setup    virtual environment, Debian packages, both distributions
#   make test     set-up, then every test (lab tests on real hosts included)
#   make check    ruff, mypy --strict, fast tests
#   make demo     the main job on three real lab hosts, as a transcript
SHELL := /bin/bash
# Tests at a time. Most wait for real hosts and processes; each lab worker has a fleet of its own.
WORKERS ?= 2
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# SGLang's router, which tests start in front of engines: a binary of 30 MB that not every machine can install.
ROUTER ?= sglang-router==0.3.2
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT_PACKAGES := systemd dbus openssh-server openssh-client iproute2 util-linux sudo

.PHONY: setup test test-fast test-lab lint check format demo detect bench-engine bench-engine-gpu bench-auto clean packages

setup: $(VENV)/.ready packages

packages:
	@.ci/packages $(APT_PACKAGES)

# pip takes a CPU build of the pinned torch where one is at hand; see docs/getting-started.md for other machines.
$(VENV)/.ready: pyproject.toml engine/pyproject.toml requirements.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later was found"; echo "hint:  install one, or: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || { .ci/packages python3-venv; $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e engine -e .
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.txt $(ROUTER) \
		|| echo "$(ROUTER) cannot be had here (only the tests that start it need it): they are skipped"
	@touch $@

test: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/ddops tests/engine tests/contract
	$(SUDO) $(BIN)/python -m pytest -q -n $(WORKERS) tests/lab

test-fast: setup
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/ddops tests/engine tests/contract -m "not slow"

test-lab: setup
	$(SUDO) $(BIN)/python -m pytest -q -n $(WORKERS) tests/lab

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) tests/ddops tests/engine tests/contract -m "not slow"

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: setup
	@$(SUDO) $(BIN)/ddops demo

detect: setup
	$(BIN)/python -m ddops.prove.detect --out docs/detection.md --sensitivity ddops/prove/sensitivity.json

# Peers are run beside ours where their paths are given, such as PEERS="--hf-python DIR/bin/python"; see docs/performance.md.
bench-engine: setup
	$(BIN)/python engine/benchmarks/bench_engine.py
	cd engine && $(abspath $(BIN))/python -m benchmarks.peers.run $(PEERS)

bench-engine-gpu:
	PYTHONPATH=engine $(PYTHON) engine/benchmarks/bench_engine.py --device cuda --dtype bfloat16 --batch 1 4 16 32
	PYTHONPATH=engine $(PYTHON) engine/benchmarks/shape8b.py
	PYTHONPATH=engine $(PYTHON) engine/benchmarks/few_rows.py

# What budget `auto` loses, replayed over recorded acceptance and measured costs (a minute), then live on this machine.
bench-auto: setup
	cd engine && $(abspath $(BIN))/python -m benchmarks.auto_replay || test $$? = 1
	$(BIN)/python engine/benchmarks/auto_live.py --batch 1 4

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
