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

ASAN := build/asan
ASAN_PYTHON := $(ASAN)/venv/bin/python
# pip and its build backend need the packages of $(VENV); our module there must not be found.
PATHS := import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
# ASan's runtime has to come first, and find the C++ library whose exceptions it follows. Python
# itself leaks at exit, by design; numpy asks for impossible sizes in tests.
ASAN_RUN = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32 \
	UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc SPIKE_EXACT_MEMORY=1 OMP_NUM_THREADS=1 \
	$(ASAN_PYTHON) -P -m pytest -q -p no:cacheprovider
ASAN_TESTS := $(wildcard tests/numeric/test_kernels_*.py tests/numeric/test_ops_*.py) \
	tests/numeric/test_error_feedback.py tests/numeric/test_quantize_error.py \
	tests/numeric/test_quantize_stream.py

.PHONY: install kernels models quickstart test test-asan test-slow test-all test-gpu lint clean

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

# Files of tests side by side, at most four: each process holds a model or two.
test: models $(VENV)/tensorrt
	$(BIN)/pytest -q -n auto --maxprocesses 4 --dist loadfile tests/unit tests/text tests/numeric tests/engine

# Builds engines for NVIDIA GPUs, also where there is none. Without it its tests are skipped.
$(VENV)/tensorrt: $(VENV)/installed
	$(PIP) install -q -c constraints.txt tensorrt-rtx
	@touch $@

# Our C++ under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own: any read
# outside an array and any undefined behaviour ends the run.
test-asan: $(ASAN)/built
	$(ASAN_RUN) $(ASAN_TESTS)

$(ASAN)/built: $(VENV)/installed CMakeLists.txt $(KERNELS)
	@echo "building the kernels with sanitizers"
	@$(BIN)/python -m venv --without-pip $(ASAN)/venv
	@$(BIN)/python -P -c '$(PATHS)' > "$$($(ASAN_PYTHON) -c '$(PURELIB)')/shared.pth"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --python $(ASAN_PYTHON) install -q --no-build-isolation \
		--no-deps -C cmake.define.SPIKE_SANITIZE=ON -C build-dir=$(ASAN)/cmake \
		-C install.strip=false -e .
	@touch $@

test-slow: models
	$(BIN)/pytest -q tests/slow

# Every model type of transformers (under an hour on two cores); writes docs/architectures.md.
test-all: models
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/architectures.py
	$(BIN)/pytest -q tests/slow

# TensorRT engines, built and run: on a machine with an NVIDIA GPU (elsewhere: skipped, with reason).
test-gpu: models $(VENV)/tensorrt
	$(BIN)/pytest -q -rs tests/gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .cache/engines .mypy_cache .pytest_cache .ruff_cache .hypothesis
