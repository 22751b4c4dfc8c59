# make test    creates the environment and passes the tests
# make digits  trains a mixture VAE on the embedded digits and shows what it found, in runs/digits
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

.PHONY: test lint digits clean
test: $(VENV)/ready lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

digits: $(VENV)/ready
	rm -rf runs/digits
	$(BIN)/aevb train gmvae --data digits --out runs/digits --epochs 60
	$(BIN)/aevb evaluate runs/digits --data digits
	$(BIN)/aevb sample runs/digits --out runs/digits/samples.png

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
