# make quickstart: from a bare machine to a streamed answer.      make test: all tests.
# Each does all set-up first; it needs Python 3.11+, a C++20 compiler and a package index.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Tests start by the pytest script: `python -m pytest` would put the checkout, and with it a folder
# named like the package `kernels` that transformers probes for, on sys.path.
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODELS := .cache/models
ENGINE := .cache/engines/smollm2
KERNELS := $(shell find kernels -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
REQUIREMENTS := import tomllib; \
	whole = tomllib.load(open("pyproject.toml", "rb")); project = whole["project"]; \
	extras = project["optional-dependencies"]; \
	print(*whole["build-system"]["requires"], "cmake", "ninja", *project["dependencies"], \
	*extras["build"], *extras["dev"], sep="\n")

.PHONY: install kernels models quickstart test test-slow test-all lint clean

install: $(VENV)/built

# Pinned packages. A .venv of another checkout (its scripts name other paths) or without a working
# Python is made anew.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=..."; exit 1; }
	@grep -qsF '$(CURDIR)/$(VENV)' $(BIN)/activate && $(BIN)/python -c '' 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	@echo "installing pinned packages into $(VENV) (torch is the largest)"
	@$(BIN)/python -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	$(PIP) install -q -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

# The editable install shows Python changes at once; C++ and packaging changes have to be built.
$(VENV)/built: $(VENV)/installed CMakeLists.txt $(KERNELS)
	@echo "building the kernels"
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

kernels: install

quickstart: install
	TQDM_DISABLE=1 $(BIN)/python benchmarks/models.py smollm2
	$(BIN)/spike-build --model $(MODELS)/SmolLM2-135M-Instruct --recipe smollm2-135m-q4_k_m \
		--output-dir $(ENGINE)
	$(BIN)/spike run $(ENGINE) "What is the capital of France?"

models: install
	$(BIN)/python benchmarks/models.py all

test: models
	$(BIN)/pytest -q tests/unit tests/text tests/numeric tests/engine

test-slow: models
	$(BIN)/pytest -q tests/slow

# Every model type of transformers (under an hour on two cores); writes docs/architectures.md.
test-all: models
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/architectures.py
	$(BIN)/pytest -q tests/slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .cache/engines .mypy_cache .pytest_cache .ruff_cache .hypothesis
