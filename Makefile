# make test       creates the environment and passes the tests
# make reproduce  trains the five models on the embedded digits and writes reproduction/report.html
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Real data for the tests that want it; without it they use scikit-learn's digits.
export AEVB_DATA ?= $(wildcard $(abspath ../shared/data))

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

.PHONY: test lint reproduce clean
test: $(VENV)/ready lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reproduce: $(VENV)/ready
	$(BIN)/aevb reproduce --out reproduction

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
