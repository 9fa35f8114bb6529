# make demo, make test: all that a newcomer needs. TORCH=2.15.0 uses another torch, in an environment of its own.

PINNED := 2.13.0
TORCH ?= $(PINNED)
PYTHON ?= python3
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
NATIVE := $(shell find csrc tests/gpu examples -name '*.cpp' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
PACKAGES := $(shell find plugin diagnostics -name __init__.py)

.PHONY: demo test test-short corpus lint format setup clean

demo: setup ## the main job on a real compiled model, with a report at the end
	@$(BIN)/python examples/demo.py

test: setup $(BIN)/.test ## the whole suite
	@tools/test $(BIN)/python $(ARGS)

test-short: setup $(BIN)/.test ## the part of the suite that also runs on a second torch
	@$(BIN)/python -m pytest -m core $(ARGS)

corpus: setup $(BIN)/.test ## how often the diagnosis of the cases under tests/corpus is right
	@tests/corpus/run $(BIN)/python $(BIN)/opgraft $(ARGS)

lint: setup $(BIN)/.lint ## ruff, mypy --strict and clang-format's check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	@tools/typecheck $(BIN)/mypy

format: $(BIN)/.lint ## put every file into shape
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(NATIVE)

setup: $(BIN)/.ready ## environment, dependencies and build; nothing is repeated

# The environment with torch, made once.
$(BIN)/.torch:
	@echo "making $(VENV) with torch $(TORCH)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "torch==$(TORCH)"
	@touch $@

# What the tools need, and what the tests need beside it; again when pyproject.toml changes.
$(BIN)/.dependencies: $(BIN)/.torch pyproject.toml
	@echo "installing what the tools need"
	@$(PYTHON) tools/dependencies.py diagnostics > $(VENV)/tools.txt
	@$(PIP) "torch==$(TORCH)" -r $(VENV)/tools.txt
	@touch $@

$(BIN)/.test: $(BIN)/.dependencies
	@echo "installing what the tests need"
	@$(PYTHON) tools/dependencies.py test > $(VENV)/test.txt
	@$(PIP) "torch==$(TORCH)" -r $(VENV)/test.txt
	@touch $@

# The native libraries and the editable install, again when a source changes.
$(BIN)/.ready: $(BIN)/.dependencies $(SOURCES) $(PACKAGES)
	@echo "building the kernels"
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(BIN)/.lint: $(BIN)/.torch pyproject.toml
	@$(PYTHON) tools/dependencies.py lint > $(VENV)/lint.txt
	@$(PIP) -r $(VENV)/lint.txt
	@touch $@

clean: ## remove what was built, keep the environments
	rm -rf build dist plugin/lib *.egg-info $(BIN)/.ready
