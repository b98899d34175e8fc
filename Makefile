# `make demo` and `make test` set up what they need. Nothing but Python 3.11 (or later), a C++ compiler and make is
# assumed, and without the compiler all works on the torch reference of the operators.

PYTHON ?= python3
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=
FAIRSEQ ?= fairseq==0.12.2
TRANSFORMERS_VERSIONS ?= 5.4.0 5.10.4 5.17.0 5.23.0

BIN := .venv/bin
# As many processes as there are cores share out the files of tests; on a GPU one has it for itself.
SHARED_OUT := $(if $(findstring --device,$(PYTEST_ARGS)),,--numprocesses auto --maxprocesses 8 --dist loadfile)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test lint format test-versions bench bench-quick gpu-check wheel clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.built ## make the virtual environment .venv and build the operators

demo: setup ## generate for 500 real sources, unpatched and patched, and compare
	$(BIN)/python examples/demo.py

test: setup lint ## run all tests; PYTEST_ARGS="--device cuda tests/ops" for some of them or elsewhere
	$(BIN)/python -m pytest $(SHARED_OUT) $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## all benchmarks; the results go to benchmarks/results
	$(BIN)/python -m benchmarks

bench-quick: setup ## small benchmarks, in under five minutes
	$(BIN)/python -m benchmarks --quick

gpu-check: ## check and measure all that needs an NVIDIA GPU, in nine minutes, with the Python that has torch
	$(PYTHON) tools/gpu_check.py $(GPU_CHECK_ARGS)

wheel: setup ## build a wheel into dist
	rm -rf build
	$(BIN)/pip wheel -q --no-build-isolation --no-deps -w dist .

clean: ## remove everything that was built or installed
	rm -rf .venv .venvs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fastgen fastgen_cli tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
	rm -f fastgen/ops/libfastgen_*

# The extension is built in place by a step of its own, so that a change of its sources re-makes no more than it.
# FairSeq without its dependencies, of which no current pip can install the releases that it asks for, and built where
# there is no torch: with torch it builds extensions whose sources are not in its release.
.venv/.dependencies: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt setuptools torch
	FASTGEN_NO_EXT=1 $(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[transformers,fairseq,cli,dev,bench]'
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --no-deps $(FAIRSEQ) > .venv/fairseq.log 2>&1 \
		|| echo '$(FAIRSEQ) could not be installed (see .venv/fairseq.log): its tests are left out'
	touch $@

.venv/.built: .venv/.dependencies setup.py $(shell find fastgen/csrc -type f)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

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
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .venvs/$*/constraints.txt
	.venvs/$*/bin/pip install -q -c .venvs/$*/constraints.txt setuptools torch
	FASTGEN_NO_EXT=1 .venvs/$*/bin/pip install -q -c .venvs/$*/constraints.txt --no-build-isolation -e '.[dev]' transformers==$* $(HUB)
	touch $@

.PRECIOUS: .venvs/%/.dependencies
