# `make demo` and `make test` do all set-up on a fresh machine (Python 3.10-3.13, Linux x86_64).
#
# PyPI's torch is a CUDA build of several GB. To install the CPU build instead:
#   make demo TORCH_INDEX=<URL of PyTorch's CPU wheel index>
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
# Processes that run tests at a time.
JOBS ?= 2
PARALLEL := $(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
PIP_FLAGS := --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test test-fast lint env lock clean

demo: env
	$(BIN)/liveserve demo

# Several modules at a time; then one by one what depends on real time. Both parts run, whatever fails.
test: env lint
	$(PARALLEL) -m "not alone"; first=$$?; $(BIN)/pytest -q -m alone && exit $$first

# Everything that runs none of the host's engines.
test-fast: env
	$(PARALLEL) -m "not host"

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

env: $(VENV)/.installed

$(VENV)/.installed: requirements/cpu.lock pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) --no-deps -r requirements/cpu.lock
	$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	touch $@

# Newest versions that pyproject.toml allows, then pinned. torchcodec is left out: its CUDA build
# cannot be imported beside a CPU torch, and the host does without it.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/pip install $(PIP_FLAGS) ".[cpu,dev]" setuptools
	.venv-lock/bin/pip freeze --all --exclude liveserve --exclude torchcodec --exclude pip \
	    | sed 's/+cpu$$//' > requirements/cpu.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .cache out build dist *.egg-info
