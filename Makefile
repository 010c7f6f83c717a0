# Every target sets up what it needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/colchis
UV := $(CACHE)/uv/bin/uv
UV_VERSION := 0.13.9
export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help setup package demo base test test-slow test-cluster test-cluster-full test-cluster-image test-cluster-sglang test-sglang cluster-up cluster-down check render requirements clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(UV):
	$(PYTHON) -m venv $(CACHE)/uv
	$(CACHE)/uv/bin/pip install -q --disable-pip-version-check uv==$(UV_VERSION)

$(VENV)/.ready: requirements/dev.txt pyproject.toml | $(UV)
	@echo "setting up $(VENV) (once; a few minutes and about 6 GB, most of it torch)"
	test -x $(BIN)/python || $(UV) venv -q --python $(PYTHON) $(VENV)
	$(UV) pip install -q --python $(BIN)/python --no-deps --require-hashes --compile-bytecode -r requirements/dev.txt
	$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

setup: $(VENV)/.ready ## make the Python environment in .venv

package: setup ## install a package of yours beside Colchis: make package FOLDER=...
	$(UV) pip install -q --python $(BIN)/python -e $(FOLDER)

base: setup ## make the small base model of examples/arithmetic (cached)
	$(BIN)/python examples/arithmetic/make_base.py

demo: base ## learn arithmetic on this machine: 100 iterations, report.html
	$(BIN)/colchis run examples/arithmetic/run.yaml

test: setup ## all tests that need neither a cluster nor SGLang
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not cluster and not sglang and not slow"

test-slow: setup ## runs that are killed at every stage, and continued
	$(BIN)/pytest -q -m "slow and not cluster" tests

test-cluster: base ## conformance and a run on a real Kubernetes with Argo, started here (root; half an hour the first time)
	$(BIN)/python -m tests.cluster.harness run $(BIN)/pytest -q -m "cluster and not slow and not sglang" tests/cluster

test-cluster-full: base ## with every fault, two pools and sixty iterations (an hour and a half)
	$(BIN)/python -m tests.cluster.harness run $(BIN)/pytest -q -m "cluster and not sglang" tests/cluster

test-cluster-image: base ## the same run, its stages from the image of images/stage (builds it; minutes)
	COLCHIS_BUILT_STAGE=yes $(BIN)/python -m tests.cluster.harness run $(BIN)/pytest -q -m cluster tests/cluster/test_argo_submit.py

test-cluster-sglang: base ## a run on real SGLang in a pod (installs SGLang the first time; minutes)
	$(BIN)/python components/engine/sglang_cpu/environment.py
	COLCHIS_SGLANG=required $(BIN)/python -m tests.cluster.harness run $(BIN)/pytest -q -m "cluster and sglang" tests/cluster

cluster-up: setup ## keep a test cluster: see tests/cluster/README.md
	$(BIN)/python -m tests.cluster.harness up

cluster-down: setup ## end it
	$(BIN)/python -m tests.cluster.harness down

test-sglang: base ## the contract of engines and the reload path, on real SGLang on a CPU (installs it the first time)
	$(BIN)/python components/engine/sglang_cpu/environment.py
	COLCHIS_SGLANG=required $(BIN)/pytest -q -m sglang tests/contract tests/run tests/sglang

check: setup ## format, lint, types, import rules, rendered files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/colchis render --check
	$(BIN)/colchis lint
	$(BIN)/colchis reference --check

render: setup ## write manifests/ from workflows/*.py
	$(BIN)/colchis render

PINNED = $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --override requirements/overrides.txt --no-emit-package pycosat --custom-compile-command "make requirements"
requirements: | $(UV) ## pin the requirements again, with hashes
	$(PINNED) --all-extras --group dev pyproject.toml -o requirements/dev.txt
	$(PINNED) -c requirements/dev.txt --extra agent --extra environments pyproject.toml -o images/stage/requirements.txt
	$(PINNED) -c requirements/dev.txt --extra trainer pyproject.toml -o images/trainer/requirements.txt
	$(PINNED) -c requirements/dev.txt --extra engine pyproject.toml -o images/engine-embedded/requirements.txt

clean: ## remove the environment and the local home (.colchis)
	rm -rf $(VENV) .colchis
