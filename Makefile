# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They need Python 3.11, a C++20 compiler and make; the rest they fetch.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# For CMake, which asks Python for the headers that come as packages.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
JOBS ?= $(shell nproc)
# Editable install into .venv, sharing the build tree of preset `dev`.
EDITABLE := --no-build-isolation --no-deps -q -e . \
  -C build-dir=build/dev -C cmake.build-type=RelWithDebInfo \
  -C cmake.define.MEMSCALE_TESTS=ON -C cmake.define.MEMSCALE_WERROR=ON

# pip's progress, one line a package.
PIP_LINES := sed -n '/^Collecting/p; /^Successfully/p'
say = printf '\n\033[1m== %s\033[0m\n' "$(1)"

# What a build depends on: the C++ and CMake files, and which Python files
# exist (their content is read from the source tree).
CXX_FILES := $(shell find src cmake -type f) CMakeLists.txt CMakePresets.json pyproject.toml
PY_FOLDERS := $(shell find python -type d -not -name __pycache__)

.PHONY: help demo setup build test test-cpp test-core test-sanitizers test-python \
  test-full test-zoo test-cuda cuda-compile fuzz bench format lint clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

demo: build ## set up, build and train a small GPT-2 on the simulated accelerator
	@$(VENV)/bin/python examples/demo.py

setup: $(VENV)/.ready $(VENV)/.test-libraries ## .venv with torch and tools; C++ test libraries

$(VENV)/.torch:
	@$(call say,Python environment and torch 2.13 (CPU build): about a minute)
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), sys.version' \
	  || { echo "MemScale needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@CPPFLAGS="-I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
	  tools/debian_packages.sh Python.h=python3-dev
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --progress-bar off torch==2.13.0 | $(PIP_LINES)
	@touch $@

$(VENV)/.ready: $(VENV)/.torch requirements-dev.txt
	@$(call say,build and test tools)
	@$(PIP) install --progress-bar off -r requirements-dev.txt | $(PIP_LINES)
	@touch $@

$(VENV)/.test-libraries: $(VENV)/.ready
	@tools/debian_packages.sh gtest/gtest.h=libgtest-dev rapidcheck.h=librapidcheck-dev \
	  benchmark/benchmark.h=libbenchmark-dev
	@touch $@

build: build/dev/.installed ## compile the C++ and install the package into .venv

build/dev/.installed: $(VENV)/.ready $(CXX_FILES) $(PY_FOLDERS)
	@$(call say,building: a few minutes the first time)
	@cmake --preset dev -DPython3_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python >build.log 2>&1 \
	  || { cat build.log; exit 1; }; rm -f build.log
	@cmake --build build/dev -j $(JOBS) --target _C _simdev
	@$(PIP) install $(EDITABLE)
	@# Importing would make __pycache__ later, and a changed folder means a build.
	@$(VENV)/bin/python -m compileall -q python
	@touch $@

test: build test-cpp test-sanitizers test-python ## every quick test: C++, sanitizers, Python

test-cpp: build $(VENV)/.test-libraries
	@$(call say,C++ tests)
	@cmake build/dev >/dev/null
	@cmake --build build/dev -j $(JOBS) --target cpp_tests
	@ctest --preset dev

test-core: $(VENV)/.test-libraries ## torch-free layers only: build and test in under a minute
	@$(call say,core-only build and tests)
	@cmake --preset core-only >/dev/null
	@cmake --build --preset core-only -j $(JOBS) --target cpp_tests
	@ctest --preset core-only

test-sanitizers: $(VENV)/.test-libraries ## torch-free layers under ASAN + UBSAN, those with threads under TSAN
	@for preset in asan tsan; do \
	  $(call say,torch-free tests under $$preset); \
	  cmake --preset $$preset >/dev/null; \
	  cmake --build --preset $$preset -j $(JOBS); \
	  ctest --preset $$preset; \
	done

# A process for each core, whole files at a time. Threads that wait do not spin:
# with several processes there are more of them than cores.
PYTEST := OMP_WAIT_POLICY=passive $(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -q

test-python: build
	@$(call say,Python tests)
	@$(PYTEST) -m "not full"

test-full: test ## the long versions too
	@$(call say,long tests)
	@$(PYTEST) -m full

# HF_HUB_OFFLINE: models are made from configs, nothing is fetched. A run that may
# be stopped and goes on later: make test-zoo ZOO="--processes 1 --results zoo.jsonl"
ZOO ?=
test-zoo: build ## hundreds of tiny models, plain, wrapped and under budgets: an hour
	@$(call say,zoo: models in plain torch and every architecture of transformers)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)/bin/python tests/python/zoo/run.py $(ZOO)

# A CUDA build of torch over stand-in libraries: tests/cuda_standin/README.md. What
# pip is asked for may be a file. CUDA_STANDIN=required: fails where there is none.
CUDA_TORCH ?= torch==2.13.0
CUDA_STANDIN ?= optional
CUDA_TESTS ?=
test-cuda: build cuda-compile ## train on a CUDA build of torch, without a card
	@$(call say,CUDA build of torch on stand-in libraries)
	@$(VENV)/bin/python tests/cuda_standin/run.py --torch "$(CUDA_TORCH)" \
	  --if-missing $(if $(filter required,$(CUDA_STANDIN)),fail,pass) -- $(CUDA_TESTS)

cuda-compile: $(VENV)/.ready ## compile the CUDA kernels (their bodies are tested on the host, by test-core)
	@$(call say,CUDA kernels: compiled only)
	@if command -v nvcc >/dev/null; then \
	  cmake --preset cuda-compile >/dev/null && \
	  cmake --build --preset cuda-compile -j $(JOBS); \
	else echo "not compiled: no nvcc in PATH"; fi

FUZZ_SECONDS ?= 60

fuzz: $(VENV)/.ready ## libFuzzer on plans for a minute (FUZZ_SECONDS); needs clang
	@$(call say,fuzzing plans for $(FUZZ_SECONDS) s)
	@CXX=clang++-19 tools/debian_packages.sh vector=clang-19 \
	  fuzzer/FuzzedDataProvider.h=libclang-rt-19-dev
	@cmake --preset fuzz >/dev/null
	@cmake --build --preset fuzz -j $(JOBS) --target plan_json_fuzz
	@mkdir -p build/fuzz/corpus build/fuzz/findings
	@build/fuzz/tests/fuzz/plan_json_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=4096 \
	  -dict=tests/fuzz/plan_json.dict -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/findings/ build/fuzz/corpus tests/fuzz/plan_json

bench: build $(VENV)/.test-libraries ## speed: figures, never assertions
	@cmake --preset release -DPython3_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python >/dev/null
	@cmake --build --preset release -j $(JOBS) --target cpp_benchmarks
	@build/release/benchmarks/cpp/allocator_benchmark
	@build/release/benchmarks/cpp/solver_benchmark
	@build/release/benchmarks/cpp/kernels_benchmark
	@$(VENV)/bin/python -m memscale.benchmarks predict
	@$(VENV)/bin/python -m memscale.benchmarks recompute
	@$(VENV)/bin/python -m memscale.benchmarks budget
	@$(VENV)/bin/python -m memscale.benchmarks optimizer
	@$(VENV)/bin/python -m memscale.benchmarks overhead

CPP_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

format: $(VENV)/.ready ## rewrite sources in the house format
	@clang-format -i $(CPP_SOURCES)
	@ruff format -q . && ruff check -q --fix .

lint: build ## formats, types, spelling, layers, clang-tidy on the torch-free layers
	@clang-format --dry-run -Werror $(CPP_SOURCES)
	@ruff format --check -q . && ruff check -q .
	@mypy
	@codespell $$(git ls-files)
	@$(VENV)/bin/python tools/check_layers.py
	@git ls-files 'src/memscale/base/*.cpp' 'src/memscale/core/*.cpp' src/memscale/simdev/heap.cpp \
	  | xargs -n 4 -P $(JOBS) clang-tidy -p build/dev --quiet 2>/dev/null

clean: ## remove builds (keeps .venv)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
