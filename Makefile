# kvferry's tasks. `make` lists them. Nothing is needed beforehand but Rust, g++, make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU the demo needs no kernels, so it fetches no CUDA compiler.
DEMO_CUDA := $(if $(wildcard /dev/nvidia0 /proc/driver/nvidia/version),auto,off)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench soak fuzz fmt clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

demo: ## build, install into .venv and run the main job on whatever is here
	@echo "kvferry demo: moves KV-cache blocks of five models between layouts and verifies every byte."
	@echo "First run: builds the package (about 2 minutes on 2 cores, kernels $(DEMO_CUDA)); then shows results within 10 s."
	@$(MAKE) --no-print-directory $(BIN)/python
	@KVFERRY_CUDA=$(DEMO_CUDA) CARGO_TARGET_DIR=$(CURDIR)/target/wheel $(BIN)/python -m pip install -q --disable-pip-version-check . "numpy>=2.0"
	@$(BIN)/kvferry demo

test: ## every rung of the test ladder that this machine can climb; what CI runs
	@$(PYTHON) scripts/rungs.py test

check: ## the inner loop: format, lints, Rust and Python tests, no CUDA compiler
	@$(PYTHON) scripts/rungs.py check

bench: ## the host engine against memcpy and NumPy, and what planning costs (a quiet machine, please)
	@$(PYTHON) scripts/rungs.py bench

soak: ## the long runs: a million jobs, big property-test counts
	@$(PYTHON) scripts/rungs.py soak

fuzz: ## everything that reads hostile input, FUZZ_SECONDS (60) per target
	@scripts/fuzz.sh $(or $(FUZZ_SECONDS),60)

fmt: ## format everything
	cargo fmt --all
	@$(PYTHON) scripts/rungs.py tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove everything that was built or installed here
	rm -rf target .venv .nvcc dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
