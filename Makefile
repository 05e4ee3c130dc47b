# The two commands for a newcomer are `make demo` and `make test`. Both set up .venv on first use: torch, the packages of
# requirements-dev.txt and examples/requirements.txt, and the project itself, editable. Without nvcc >= 12.8 they say so
# and install without kernels.
#
#   PYTHON=python3.12        the interpreter that .venv is made from
#   TORCH=torch==2.13.0      what pip installs if .venv has no torch (any torch >= 2.9, with CUDA or without)
#   GPU_PYTHON=python3       for gpu-test, bench, train, sanitize: an interpreter with torch where the wheel is installed already

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
CUTLASS := $(shell sed -n 's/.*"\(nvidia-cutlass==[^"]*\)".*/\1/p' pyproject.toml)
GPU := $(or $(GPU_PYTHON),$(BIN)/python)
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE_SOURCES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: install demo test lint format build-report check-binary wheel gpu-test bench train sanitize clean

demo: install
	$(BIN)/python examples/sentence_encoder.py

test: install
	$(BIN)/python -m pytest -q tests --ignore tests/gpu

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(BIN)/python -m buildtools.includes

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

build-report:
	$(BIN)/python -m buildtools.report

# What must hold for a binary that is given away: the instructions of its kernels, and what it asks of torch and Python.
check-binary:
	$(BIN)/python -m buildtools.sass flash_attn3/_C.so
	$(BIN)/python -m buildtools.symbols flash_attn3/_C.so

wheel: install
	$(PIP) wheel --no-build-isolation --no-deps -w dist .

gpu-test: $(if $(GPU_PYTHON),,install)
	$(GPU) tests/gpu/record.py

bench: $(if $(GPU_PYTHON),,install)
	$(GPU) -m benchmarks.run

train: $(if $(GPU_PYTHON),,install)
	$(GPU) -m benchmarks.train_gpt

sanitize: $(if $(GPU_PYTHON),,install)
	$(GPU) tests/gpu/sanitize.py

# The build prints a line for each finished unit, which pip would hide; pip then finds everything built.
install: $(VENV)/.tools
	@if $(BIN)/python -m buildtools.toolchain > /dev/null; then \
	  $(BIN)/python -m buildtools.build && $(MAKE) -s --no-print-directory $(VENV)/.kernels; \
	else \
	  FLASH_ATTN3_PORTABLE=1 $(MAKE) -s --no-print-directory $(VENV)/.portable; \
	fi

$(VENV)/.tools: requirements-dev.txt examples/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	@echo "installing the packages of requirements-dev.txt and examples/requirements.txt"
	@$(PIP) install -q --no-warn-conflicts -r requirements-dev.txt -r examples/requirements.txt
	@$(PIP) install -q --no-deps $(CUTLASS)
	@touch $@

# An editable install, once as it has kernels and once as it has none; each undoes the other's stamp.
$(VENV)/.kernels $(VENV)/.portable: $(VENV)/.tools setup.py pyproject.toml flash_attn3/version.py
	@echo "installing the project, editable"
	@$(PIP) install -q --no-build-isolation --no-deps -e .
	@rm -f $(VENV)/.kernels $(VENV)/.portable
	@touch $@

clean:
	rm -rf build dist *.egg-info hopper/*.egg-info flash_attn3/_C.so flash_attn3/_build.json
