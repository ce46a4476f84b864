# Every verb sets itself up: it needs nothing but Python 3.10 or newer (PYTHON=/path/to/python3 picks another one).
# With an NVIDIA GPU (nvidia-smi answers) the CUDA builds are installed, without one the CPU builds. To save disk on
# a CPU host, point pip at PyTorch's CPU wheels with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD ?= $(shell nvidia-smi -L 2>/dev/null | grep -q . && echo cuda || echo cpu)
STAMP := $(VENV)/.installed-$(BUILD)
TORCHREC := torchrec==1.8.0
RANKS ?= 2
PYTEST_ARGS ?=
BENCHES ?= calibrate_analytic repeatability exchange_sweep hook_overhead planner_scale plan_quality

.PHONY: help setup demo test check bench test-gpu clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## install everything into .venv

# Repeated when setup.py or this file changes, so a changed requirement is installed and a second run is quick.
$(STAMP): setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) lacks the venv module; install it (Debian and Ubuntu: python3-venv) or try make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Installing the $(BUILD) builds into $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[$(BUILD),plot,dev]'
	@test $(BUILD) = cuda || $(BIN)/python -m pip install --disable-pip-version-check --no-deps $(TORCHREC)
	@touch $@

demo: $(STAMP)  ## plan a real model with both planners, train it on two ranks, compare the measured step times
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node $(RANKS) examples/demo.py

test: $(STAMP)  ## run the tests
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP)  ## formatter, linter, types and tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(STAMP)  ## run the quicker benchmarks (BENCHES="names" picks others of benchmarks/)
	@for name in $(BENCHES); do echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py || exit 1; done

test-gpu: $(STAMP)  ## run the tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	  echo "error: test-gpu needs a CUDA device, and PyTorch finds none" >&2; exit 1; }
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

clean:  ## remove the environment, what was built and the tools' caches
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache *.egg-info
