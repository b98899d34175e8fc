# `make demo` and `make test` set up what they need. They assume Python 3.11 or later, make and a C++ compiler. With
# FASTGEN_NO_EXT=1 in the environment they need none, and the operators run on their torch reference.

PYTHON ?= python3
# What pip is asked for as torch; `cpu` for the build without CUDA; `installed` for the torch that PYTHON already has.
TORCH ?= torch
PYTEST_ARGS ?=
# What `make test` does before the tests; empty where it was done already.
LINT ?= lint
GPU_CHECK_ARGS ?=
CHECK_WHEEL ?=
FAIRSEQ ?= fairseq==0.12.2
OPENVINO ?= optimum-intel==2.2.0 openvino==2026.4.1 openvino-genai==2026.4.1.0 nncf
LLAMA_CPP ?= llama-cpp-python==0.3.36
TRANSFORMERS_VERSIONS ?= 5.4.0 5.10.4 5.17.0 5.23.0 5.24.0

BIN := .venv/bin
# The test processes share out the tests: one that is done takes over some of another's (how many: tests/conftest.py). On
# a GPU there is one process.
SHARED_OUT := $(if $(findstring --device,$(PYTEST_ARGS)),,--numprocesses auto --maxprocesses 8 --dist worksteal)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles the modules that are imported. pip would compile all that it installs, which takes most of a minute.
INSTALL := $(BIN)/pip install --no-compile

.PHONY: help setup demo test test-long test-machines lint types style docs format test-versions test-newest bench bench-quick bench-openvino bench-llama gpu-check wheel check-wheel check-fresh clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.dependencies .venv/.built ## make the virtual environment .venv and build the operators

demo: .venv/.built ## install what the commands need, generate for 500 real sources without and with FastGen, and compare
	@$(BIN)/python examples/demo.py

test: setup $(LINT) ## run all tests; PYTEST_ARGS="--device cuda tests/ops" for some of them or elsewhere
	$(BIN)/python -m pytest $(SHARED_OUT) $(PYTEST_ARGS)

test-long: setup ## the tests that draw very many cases, of which `make test` runs a sample
	$(BIN)/python -m pytest -m long $(SHARED_OUT) $(PYTEST_ARGS)

test-machines: setup ## the tests that depend on rounding, on every instruction set, number of threads, oneDNN on and off
	$(BIN)/python -m tests.machines $(SHARED_OUT) $(PYTEST_ARGS)

# They need no operators, so that with `--jobs` they run beside each other while these are compiled.
lint: types style ## ruff, mypy, the import contracts and the documentation

types: .venv/.dependencies
	$(BIN)/mypy

style: .venv/.dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_words.py
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: setup ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## all benchmarks; the results go to benchmarks/results
	$(BIN)/python -m benchmarks

bench-quick: setup ## small benchmarks, in under five minutes
	$(BIN)/python -m benchmarks --quick

bench-openvino: .venvs/openvino/.dependencies ## the environment in which the benchmarks compare OpenVINO

bench-llama: .venvs/llama/.dependencies ## the environment in which the benchmarks compare llama.cpp, built for this CPU

gpu-check: ## check and measure all that needs an NVIDIA GPU, in nine minutes, with the Python that has torch
	$(PYTHON) -m tools.gpu_check $(GPU_CHECK_ARGS)

ifeq ($(shell uname -sm),Linux x86_64)
wheel: .venv/.wheel-tools ## build a wheel into dist: with the CPU operators, for any x86-64 Linux with glibc 2.28 or later
	@rm -rf build dist
	@CXX=$(CURDIR)/tools/manylinux/c++ $(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist . \
		--config-settings=--build-option=--plat-name=manylinux_2_28_x86_64
else
wheel: .venv/.dependencies ## build a wheel into dist
	@rm -rf build dist
	@$(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist .
endif

check-wheel: wheel ## install the wheel where there is no compiler, for PYTHONS="python3.10 ...", and compare tokens
	$(BIN)/python tools/check_wheel.py $(CHECK_WHEEL) $(PYTHONS)

check-fresh: ## run `make demo` and `make test` in a fresh clone with an empty HOME and no settings of pip
	tools/check_fresh.sh $(MAKEOVERRIDES)

clean: ## remove everything that was built or installed
	rm -rf .venv .venvs build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fastgen fastgen_cli fastgen_serve tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f fastgen/ops/libfastgen_*

# Pins of torch and of what torch itself pins hold for the default release only.
UNPINNED := $(if $(filter-out torch cpu,$(TORCH)),torch|triton|setuptools,none)
WANTED_TORCH = $(if $(filter cpu,$(TORCH)),--extra-index-url https://download.pytorch.org/whl/cpu torch,$(filter-out installed,$(TORCH)))
SIZE = $(if $(filter torch,$(TORCH)),3 GB to download on Linux$(,) where pip takes the CUDA build of torch; \
	make demo TORCH=cpu downloads 0.4 GB and takes about five minutes,$(if $(filter installed,$(TORCH)),0.2,0.4) GB to download and about five minutes)
, := ,
CHECK_PYTHON = import sys; sys.exit("make: Python 3.11 or later is needed, and $(PYTHON) is %d.%d; \
	name another one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)
FIND_TORCH = from importlib.util import find_spec as find; import os, sys; torch = find("torch"); \
	sys.exit("make: TORCH=installed, but $(PYTHON) has no torch") if torch is None else \
	print(os.path.dirname(os.path.dirname(torch.origin)))

# What the demo needs: what a user of the commands has. The tests add the rest to it.
.venv/.demo: constraints.txt pyproject.toml
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	@[ -n "$$FASTGEN_NO_EXT" ] || command -v $${CXX:-c++} > /dev/null \
		|| { echo "make: there is no C++ compiler: install g++, name one with CXX, or set FASTGEN_NO_EXT=1"; exit 1; }
	@echo "Installing FastGen and what its commands need into .venv: $(SIZE)"
	@$(PYTHON) -m venv .venv
	@$(if $(filter installed,$(TORCH)),$(PYTHON) -c '$(FIND_TORCH)' > "$$(echo .venv/lib/python*/site-packages)/torch.pth")
	@grep -vE '^($(UNPINNED))==' constraints.txt > .venv/constraints.txt
	@$(INSTALL) -q --upgrade pip
	@$(INSTALL) -c .venv/constraints.txt setuptools $(WANTED_TORCH)
	@FASTGEN_NO_EXT=1 $(INSTALL) -c .venv/constraints.txt --no-build-isolation -e '.[transformers,cli]'
	@touch $@

# FairSeq is installed without its dependencies, because no current pip can install the releases that it asks for, and
# it is built in isolation, because it builds extensions that its release lacks where it finds torch.
.venv/.dependencies: .venv/.demo
	@echo "Installing what the tests need as well, which takes minutes"
	@FASTGEN_NO_EXT=1 $(INSTALL) -q -c .venv/constraints.txt --no-build-isolation \
		-e '.[transformers,fairseq,cli,serve,dev,bench]'
	@PIP_CONSTRAINT=.venv/constraints.txt $(INSTALL) --no-deps $(FAIRSEQ) > .venv/fairseq.log 2>&1 \
		|| echo '$(FAIRSEQ) could not be installed (see .venv/fairseq.log): its tests are left out'
	@touch $@

# The libraries are built in place by a step of its own: when their sources change, nothing else is made again.
.venv/.built: .venv/.demo setup.py $(shell find fastgen/csrc -type f)
	@echo "Compiling the operators (fastgen/csrc)"
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# Tools that only `make wheel` needs.
.venv/.wheel-tools: .venv/.demo
	@$(BIN)/pip install -q -c .venv/constraints.txt ziglang auditwheel
	@touch $@

# Each release of transformers brings its own hub client and tokenizers, so these are not held to the constraints.
VERSION_TESTS := $(TRANSFORMERS_VERSIONS:%=test-version-%)
.PHONY: $(VERSION_TESTS)

test-versions: $(VERSION_TESTS) ## run the equivalence grid against other releases of transformers

$(VERSION_TESTS): test-version-%: .venvs/%/.dependencies .venv/.built
	.venvs/$*/bin/python -m pytest tests/equivalence $(SHARED_OUT) $(PYTEST_ARGS)

# Transformers 5.4 cannot make some of its own configurations under the stricter checks of later hub clients.
.venvs/5.4.%/.dependencies: HUB := 'huggingface_hub<1.9'

.venvs/%/.dependencies: constraints.txt pyproject.toml
	$(PYTHON) -m venv --clear .venvs/$*
	grep -vE '^(transformers|tokenizers|huggingface_hub|$(UNPINNED))==' constraints.txt > .venvs/$*/constraints.txt
	.venvs/$*/bin/pip install -q -c .venvs/$*/constraints.txt 'setuptools>=77' $(or $(WANTED_TORCH),torch)
	FASTGEN_NO_EXT=1 .venvs/$*/bin/pip install -q -c .venvs/$*/constraints.txt --no-build-isolation -e '.[dev]' \
		transformers==$* $(HUB)
	touch $@

# The newest of all, as a user gets it, whatever pip's own settings hold back. NEWEST="torch==2.10.0 transformers" is the
# newest Transformers with another torch. The environment is thrown away, and the report stays. Its operators are those of
# .venv: one build serves every torch.
NEWEST ?= torch transformers
REPORT ?= .venvs/newest.md

test-newest: .venv/.built ## whether the newest transformers and torch are accelerated; REPORT says what is to be mended
	rm -rf .venvs/newest
	$(PYTHON) -m venv .venvs/newest
	PIP_CONSTRAINT=/dev/null .venvs/newest/bin/pip install -q 'setuptools>=77' $(NEWEST)
	PIP_CONSTRAINT=/dev/null FASTGEN_NO_EXT=1 .venvs/newest/bin/pip install -q --no-build-isolation -e '.[cli,dev]' $(NEWEST)
	.venvs/newest/bin/python -m tests.release_report --report $(REPORT) $(SHARED_OUT) $(PYTEST_ARGS); \
		status=$$?; rm -rf .venvs/newest; exit $$status

# optimum-intel asks for an older Transformers, and for torchvision, which the export of a language model does not use.
.venvs/openvino/.dependencies: constraints.txt
	$(PYTHON) -m venv --clear .venvs/openvino
	.venvs/openvino/bin/pip install -q $(filter torch==%,$(shell cat constraints.txt)) $(OPENVINO)
	touch $@

# Built from source, so that llama.cpp uses all instructions of this CPU, on two cores and after other work.
.venvs/llama/.dependencies:
	$(PYTHON) -m venv --clear .venvs/llama
	CMAKE_ARGS=-DGGML_NATIVE=ON CMAKE_BUILD_PARALLEL_LEVEL=2 nice \
		.venvs/llama/bin/pip install -q --no-binary llama-cpp-python $(LLAMA_CPP)
	touch $@

.PRECIOUS: .venvs/%/.dependencies
