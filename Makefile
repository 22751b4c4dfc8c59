# make test       creates the environment, checks style and types, and passes the tests, on two cores
# make test-all   the same with the tests that are marked slow, which take some minutes more
# make check      checks style and types, and passes a third of the tests, some of every package, in about a minute
# make docs       builds the documentation site into docs/_build/html, and checks its links
# make web        builds the front end of pages from web/
# make reproduce  trains the five models on the embedded digits and writes reproduction/report.html
# make compiler-tests TORCH=2.10.0  passes the tests of the step compiler and of fit with another torch
# make dist       builds the sdist and the wheel in dist/, and checks them
# make wheel-test installs the wheel in an empty environment, and runs a first recipe there
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Real data for the tests that want it; without it they use scikit-learn's digits.
export AEVB_DATA ?= $(wildcard $(abspath ../shared/data))
# The many processes of the tests read compiled files, also where the environment would not write them.
export PYTHONDONTWRITEBYTECODE :=

# The version of torch. TORCH_INDEX is torch's own package index of builds without CUDA, if wanted.
TORCH ?= 2.13.0
TORCH_INDEX ?=
PIP_TORCH = install --quiet $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)' 'torch==$(TORCH)+cpu','torch==$(TORCH)')

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip $(PIP_TORCH) --constraint $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[test]'
	touch $@

# Each worker runs whole files (tests/conftest.py), with one thread. Three on two cores: some tests wait.
WORKERS ?= 3
NPM := --ignore-scripts --no-audit --no-fund --silent
MARKED := -m 'not slow'
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(MARKED)
CHECKED := $(addprefix tests/, \
	experiments/test_experiments.py laboratory/test_compare_estimators.py \
	declare/test_declarations.py declare/test_notation.py declare/test_networks.py derive/test_large_declarations.py \
	estimate/test_estimators.py estimate/test_batch.py estimate/test_missing_values.py estimate/test_ragged_sequences.py \
	compiled_step/test_recording.py compiled_step/test_tracing.py compiled_step/test_adam.py \
	evidence/test_exact_evidence.py evidence/test_gaussian_chain.py posterior/test_posterior.py posterior/test_untrained_q.py \
	data/test_files.py data/test_sources.py data/test_preparation.py \
	training/test_fit.py training/test_resuming.py training/test_em_mixtures.py \
	diagnostics/test_diagnose.py predictive/test_predictive_check.py report/test_report.py \
	cli/test_models_and_explain.py runtime/test_seeding.py test_model.py whole/test_documents.py)

.PHONY: test test-all check lint bundle browser collected most web docs reproduce compiler-tests dist wheel-test clean
# The processes of a live page give way to all others, so its tests run after the others.
LIVE := tests/page/test_live_browser.py tests/page/test_server.py
test:
	$(MAKE) --jobs --no-print-directory bundle browser collected
	$(MAKE) --jobs --no-print-directory MARKED="$(MARKED)" lint most
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(MARKED) --dist load --maxschedchunk 1 $(LIVE)

most: $(VENV)/ready
	$(PYTEST) $(addprefix --ignore=,$(LIVE))

test-all: MARKED :=
test-all: test

check: $(VENV)/ready lint
	$(PYTEST) $(CHECKED)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests are compiled once, not by each worker.
collected: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only -qq >/dev/null

# The front end in src/aevb/page/static is built from web/ by `make web`; this checks that it is.
bundle:
	@if command -v npm >/dev/null; then cd web && npm ci $(NPM) && node build.mjs --check; \
	else echo "npm is not here, so the front end is only compared by its hash."; fi

web:
	cd web && npm ci $(NPM) && node build.mjs

# Tests of pages need Chromium. Without it they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	apt-get update -qq && apt-get install -qq --no-install-recommends chromium >/dev/null; \
	else echo "Chromium is not here: tests of pages will be skipped."; fi

# The tools of the site are installed at the first build only: no test needs them.
$(VENV)/docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/docs
	$(BIN)/python -m doctest docs/extensions/mathml.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python docs/check.py docs/_build/html

reproduce: $(VENV)/ready
	$(BIN)/aevb reproduce --out reproduction

# Another version of torch, in an environment of its own.
COMPILER_TESTS := tests/compiled_step tests/runtime tests/training/test_fit.py tests/training/test_resuming.py
compiler-tests:
	$(MAKE) VENV=.venv-torch-$(TORCH) .venv-torch-$(TORCH)/ready
	.venv-torch-$(TORCH)/bin/python -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COMPILER_TESTS)

# The wheel is built from the sdist, so that the sdist is known to be complete.
.venv-dist/ready: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint constraints.txt build twine
	touch $@

dist: .venv-dist/ready
	rm -rf build dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

# tests/first_recipe.py runs in an environment that has the wheel and what it requires, and no more.
WHEEL := .venv-wheel/bin/python
wheel-test: dist
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > .venv-wheel/constraints.txt
	$(WHEEL) -m pip $(PIP_TORCH) --constraint .venv-wheel/constraints.txt
	@start=$$(date +%s); $(WHEEL) -m pip install --quiet --constraint .venv-wheel/constraints.txt dist/*.whl && \
	echo "$$(du -h dist/*.whl), installed after torch in $$(($$(date +%s) - start)) s"
	cd .venv-wheel && bin/aevb --version && bin/python -P ../tests/first_recipe.py --times

clean:
	rm -rf $(VENV) .venv-torch-* .venv-dist .venv-wheel build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
