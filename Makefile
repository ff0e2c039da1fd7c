# make quickstart | make test: each does all set-up a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install kernels test quickstart lint

$(VENV)/installed: pyproject.toml constraints.txt CMakeLists.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch scikit-build-core nanobind cmake ninja
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[build,dev]'
	touch $@

install: $(VENV)/installed

# Rebuild the C++ after a change (an editable install does not watch it).
kernels:
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: install
	$(BIN)/pytest -q
