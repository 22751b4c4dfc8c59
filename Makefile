# make test    creates the environment and passes the tests
# make explain derives and prints the estimator of every model that comes with the library
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

.PHONY: test lint explain clean
test: $(VENV)/ready lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

explain: $(VENV)/ready
	for model in fa vae cvae gmvae m2 vrnn; do $(BIN)/aevb explain $$model && echo || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
